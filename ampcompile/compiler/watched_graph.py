"""One watched graph: the input that asks for its magnitudes, and what is kept of them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.dtypes import NAMES, first_to_infinity
from ampcompile.passes.after.record_magnitudes import SLOTS, WATCHED, WatchedValue
from ampcompile.passes.graph import placeholders
from ampcompile.torch_private import dispatcher, storages, tracing
from ampcompile.torch_private.own_thread import made_once

from .module_names import modules_of

graphs: weakref.WeakSet[WatchedGraph] = weakref.WeakSet()


@made_once
def _clock(device: torch.device) -> Tensor:
    return torch.tensor([0], dtype=torch.int64, device=device)  # waits until it is there


class WatchedGraph:
    """Keeps the magnitudes that a graph computes. `values` says of what; `of` is the callable that was compiled."""

    def __init__(self, device: torch.device, of: Any) -> None:
        self.values: list[WatchedValue] = []
        self.kept: dict[bool, LastMagnitudes] = {}  # by direction: True for backward
        self._owners = [weakref.ref(owner) for owner in _owners(of)]
        with torch.inference_mode(False):
            self.slots = torch.zeros(SLOTS, dtype=torch.float32, device=device)
        """The input; its gradient is the magnitudes of backward"""
        if torch.is_grad_enabled():
            self.slots.requires_grad_().register_post_accumulate_grad_hook(partial(_take, weakref.ref(self)))
        graphs.add(self)

    def belongs_to(self, f: Any) -> bool:
        """True if the graph is one of `f`, or of a method of the same module."""
        owners = _owners(f)
        return any(owner() is each for owner in self._owners for each in owners)

    def attach(self, gm: GraphModule) -> None:
        """Add the input and the output of the magnitudes to a captured graph, behind all others."""
        graph, mode = gm.graph, tracing.fake_mode_of(gm)
        with graph.inserting_after(placeholders(gm)[-1]):
            slots = graph.placeholder("amp_watched")
        slots._dynamo_source = None
        slots.meta["val"] = self.slots.detach() if mode is None else mode.from_tensor(self.slots.detach())
        output = graph.output_node()
        with graph.inserting_before(output):
            magnitudes = graph.call_function(WATCHED, (slots, False))
        magnitudes.meta["val"] = slots.meta["val"]
        output.args = ((*output.args[0], magnitudes),)
        gm.recompile()

    def values_in(self, backward: bool) -> list[WatchedValue]:
        """The values of one direction, in the order of their magnitudes."""
        return [value for value in self.values if value.backward == backward]

    def record(self, magnitudes: Tensor, backward: bool = False) -> None:
        """Keep the magnitudes of a call, without waiting for the device."""
        device, modes = magnitudes.device, dispatcher.without_modes()
        with torch.inference_mode(False), torch.no_grad(), modes, storages.NoTorchFunction():
            if backward not in self.kept:
                limits = [limit(value) for value in self.values_in(backward)]
                padded = limits + [0.0] * (SLOTS - len(limits))
                self.kept[backward] = LastMagnitudes(torch.tensor(padded, dtype=torch.float32, device=device))
            self.kept[backward].write(magnitudes.detach(), _clock(device))


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
        self._last_at = limits.new_zeros(2, dtype=torch.int64)  # the last call's number, from 1 on, and time; 0: none
        self._first = limits.new_zeros((2, *limits.shape))  # the call before the first out of range, and that
        self._first_at = torch.zeros_like(self._last_at)
        self.counts = torch.zeros_like(limits)  # for each value, the number of calls in which it was out of range

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


def limit(value: WatchedValue) -> float:
    """The largest magnitude that is in range: of a cast, what still rounds to a finite number."""
    if value.kind != "cast":
        return torch.finfo(torch.float32).max  # infinite numbers and NaN are above it, in any type
    return float(np.nextafter(np.float32(first_to_infinity(NAMES[value.dtype])), np.float32(0)))


def _owners(f: Any) -> list[Any]:
    function = getattr(f, "__func__", f)
    return [*modules_of(f)] or [function]


@torch.compiler.disable
def _take(graph: weakref.ref[WatchedGraph], slots: Tensor) -> None:
    magnitudes, slots.grad, watched = slots.grad, None, graph()
    if magnitudes is not None and watched is not None:
        watched.record(magnitudes, backward=True)
