"""Address ranges of memory with copies, checked by every `Tensor.data` of the process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

ranges: list[int] = []
"""Begins and ends of address ranges, in order. Freed memory may be among them."""


def set_ranges(extents: Iterable[tuple[int, int]]) -> None:
    """Replace the ranges by these extents, merged where they meet."""
    merged: list[int] = []
    for begin, end in sorted(extents):
        if merged and begin <= merged[-1]:
            merged[-1] = max(merged[-1], end)
        elif begin < end:
            merged += (begin, end)
    ranges[:] = merged


def covered(address: int) -> int:
    """Return an odd number if an address lies in a range."""
    return bisect_right(ranges, address) & 1
