"""The statistics of a watched graph's last calls, kept on its device: writing them waits for nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CALLS = 16
"""Calls whose statistics are kept."""


class Row(NamedTuple):
    """The statistics of one call: [STATISTICS, SLOTS]; `time` orders the calls of all graphs on a device."""

    time: int
    call: int
    statistics: Tensor


class Ring:
    """The statistics of the last calls in one direction, and those of the first call with a number out of range.

    All state is in tensors, which a captured CUDA graph goes on writing when it is replayed.
    """

    def __init__(self, like: Tensor) -> None:
        self._rows = like.new_zeros((CALLS, *like.shape))
        self._times = like.new_zeros(CALLS, dtype=torch.int64)
        self._calls = like.new_zeros(1, dtype=torch.int64)
        self._first = like.new_zeros((2, *like.shape))  # the call before it, and the call itself
        self._first_at = like.new_zeros(2, dtype=torch.int64)  # its number, from 1 on, and its time; 0: none yet

    @torch.no_grad()
    def write(self, statistics: Tensor, clock: Tensor) -> None:
        """Record the statistics of a call, and advance the clock."""
        place, former = self._calls % CALLS, (self._calls - 1) % CALLS
        clock += 1
        is_first = (statistics[1] > 0).any() & (self._first_at[0] == 0)
        both = torch.stack([self._rows.index_select(0, former)[0], statistics])
        torch.where(is_first, both, self._first, out=self._first)
        torch.where(is_first, torch.cat([self._calls + 1, clock]), self._first_at, out=self._first_at)
        self._rows.index_copy_(0, place, statistics[None])
        self._times.index_copy_(0, place, clock)
        self._calls += 1

    def first(self) -> tuple[Row, Tensor] | None:
        """The first call with a number out of range, and the statistics of the call before it; waits for the device."""
        call, time = self._first_at.tolist()
        before, statistics = self._first.cpu()
        return (Row(time, call, statistics), before) if call else None

    def last(self) -> Row | None:
        """The last call; waits for the device."""
        calls = int(self._calls)
        place = (calls - 1) % CALLS
        return Row(int(self._times[place]), calls, self._rows[place].cpu()) if calls else None
