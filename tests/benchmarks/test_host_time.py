"""The host's time is measured on the GPU's path, with nothing launched and everything put back."""

import pytest

from ampcompile.scaler import fused
from ampcompile.weights.copies import Copy
from benchmarks import host_time


def test_every_part_is_timed_and_nothing_stays_replaced() -> None:
    pytest.importorskip("triton")
    before = fused.adam_
    rows = host_time.measure(steps=2)
    cases = [f"148 parameters, {copies} copies" for copies in (0, 50)]
    parts = ("clip", "step", "update", "all")
    assert [row.case for row in rows] == [f"{case}: {part}" for case in cases for part in parts]
    assert all(len(row.figures["seconds"]) == 2 and min(row.figures["seconds"]) > 0 for row in rows)
    assert fused.adam_ is before


def test_steps_that_leave_copies_unwritten_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(Copy, "writable", lambda self: False)
    with pytest.raises(RuntimeError, match="had to be cast again"):
        host_time.measure(steps=2)
