"""The magnitudes of a watched graph's last call, and of the first that went out of range, kept on its device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """The magnitudes of one call, [SLOTS]; `time` orders the calls of all graphs on a device."""

    time: int
    call: int
    magnitudes: Tensor


class LastMagnitudes:
    """The magnitudes of the last call in one direction, and those of the first call with a number out of range.

    A value is out of range if its magnitude isn't at most its limit; `limits`, [SLOTS]. All state is in tensors,
    which a captured CUDA graph goes on writing when it is replayed; writing them waits for nothing.
    """

    def __init__(self, limits: Tensor) -> None:
        self._limits = limits
        self._last = torch.zeros_like(limits)
        self._last_at = limits.new_zeros(2, dtype=torch.int64)  # its number, from 1 on, and its time; 0: none yet
        self._first = limits.new_zeros((2, *limits.shape))  # the call before it, and the call itself
        self._first_at = torch.zeros_like(self._last_at)
        self.counts = torch.zeros_like(limits)
        """For each value, the number of calls in which it was out of range."""

    @torch.no_grad()
    def write(self, magnitudes: Tensor, clock: Tensor) -> None:
        """Record the magnitudes of a call, and advance the clock."""
        clock += 1
        at = torch.cat([self._last_at[:1] + 1, clock])
        out = ~(magnitudes <= self._limits)
        self.counts += out
        is_first = out.any() & (self._first_at[0] == 0)
        self._first.copy_(torch.where(is_first, torch.stack([self._last, magnitudes]), self._first))
        self._first_at.copy_(torch.where(is_first, at, self._first_at))
        self._last.copy_(magnitudes)
        self._last_at.copy_(at)

    def first(self) -> tuple[Row, Tensor] | None:
        """The first call with a number out of range, and the magnitudes of the call before it; waits for the device."""
        call, time = self._first_at.tolist()
        before, magnitudes = self._first.to("cpu", copy=True)
        return (Row(time, call, magnitudes), before) if call else None

    def last(self) -> Row | None:
        """The last call; waits for the device."""
        call, time = self._last_at.tolist()
        return Row(time, call, self._last.to("cpu", copy=True)) if call else None
