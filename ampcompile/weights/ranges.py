"""Where memory with copies lies: the question that every `.data` of the process asks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

ranges: list[int] = []
"""Ends of ranges of addresses, in order. What was freed may be among it."""


def set_ranges(extents: Iterable[tuple[int, int]]) -> None:
    """Hold these extents, merged where they meet."""
    merged: list[int] = []
    for begin, end in sorted(extents):
        if merged and begin <= merged[-1]:
            merged[-1] = max(merged[-1], end)
        elif begin < end:
            merged += (begin, end)
    ranges[:] = merged


def covered(address: int) -> int:
    """Odd if an address lies in a range."""
    return bisect_right(ranges, address) & 1
