"""Host time is measured without a GPU, and torch is as it was afterwards."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import copies_on_host


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copies_on_host.MODELS, "tiny", (1, 8))
    idle, updated = copies_on_host.measure(["tiny"], rounds=3)
    assert [len(row.figures["seconds"]) for row in (idle, updated)] == [3, 3]
    assert 0 < min(idle.figures["seconds"]) < min(updated.figures["seconds"])
    assert idle.figures["weights"] == 9 and idle.figures["parameters"] == 50304 * 8 + 12 * 64 + 9 * 8
    assert not torch.ones(1).is_cuda
