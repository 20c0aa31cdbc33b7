"""The magnitudes of a watched graph's last calls, kept on its device: writing them waits for nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CALLS = 16
"""Calls whose magnitudes are kept."""


class Row(NamedTuple):
    """The magnitudes of one call, [SLOTS]; `time` orders the calls of all graphs on a device."""

    time: int
    call: int
    magnitudes: Tensor


class Ring:
    """The magnitudes of the last calls in one direction, and those of the first call with a number out of range.

    A value is out of range if its magnitude isn't at most its limit; `limits`, [SLOTS]. All state is in tensors,
    which a captured CUDA graph goes on writing when it is replayed.
    """

    def __init__(self, limits: Tensor) -> None:
        self._limits = limits
        self._rows = limits.new_zeros((CALLS, *limits.shape))
        self._times = limits.new_zeros(CALLS, dtype=torch.int64)
        self._calls = limits.new_zeros(1, dtype=torch.int64)
        self._first = limits.new_zeros((2, *limits.shape))  # the call before it, and the call itself
        self._first_at = limits.new_zeros(2, dtype=torch.int64)  # its number, from 1 on, and its time; 0: none yet
        self.counts = torch.zeros_like(self._limits)
        """For each value, the number of calls in which it was out of range."""

    @torch.no_grad()
    def write(self, magnitudes: Tensor, clock: Tensor) -> None:
        """Record the magnitudes of a call, and advance the clock."""
        place, former = self._calls % CALLS, (self._calls - 1) % CALLS
        clock += 1
        out = ~(magnitudes <= self._limits)
        self.counts += out
        is_first = out.any() & (self._first_at[0] == 0)
        both = torch.cat([self._rows.index_select(0, former), magnitudes[None]])
        self._first.copy_(torch.where(is_first, both, self._first))
        self._first_at.copy_(torch.where(is_first, torch.cat([self._calls + 1, clock]), self._first_at))
        self._rows.index_copy_(0, place, magnitudes[None])
        self._times.index_copy_(0, place, clock)
        self._calls += 1

    def first(self) -> tuple[Row, Tensor] | None:
        """The first call with a number out of range, and the magnitudes of the call before it; waits for the device."""
        call, time = self._first_at.tolist()
        before, magnitudes = self._first.cpu()
        return (Row(time, call, magnitudes), before) if call else None

    def last(self) -> Row | None:
        """The last call; waits for the device."""
        calls = int(self._calls)
        place = (calls - 1) % CALLS
        return Row(int(self._times[place]), calls, self._rows[place].cpu()) if calls else None
