"""Ours casts no more bytes than eager autocast in any architecture, and placing by bytes reaches the cut's bound."""

import pytest

from benchmarks.cast_table import NAMES, amp, eager, saved_by_cut

QUICK = ("MLP", "GQA")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_never_above_eager_and_bytes_at_the_bound(name: str) -> None:
    theirs, ours, placed = eager(name), amp(name, "eager"), amp(name, "bytes")
    assert ours.bytes < theirs.bytes and ours.casts < theirs.casts
    assert placed.bytes <= ours.bytes - saved_by_cut(name)
