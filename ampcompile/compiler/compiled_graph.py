"""The callable that Dynamo installs for one graph: it runs the compiled code, and does our work around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile import weights
from ampcompile.config import Options
from ampcompile.passes.weight_copy import Slot
from ampcompile.torch_private import storages, tracing

from .call_state import current_call
from .double_backward import DoubleBackward
from .widen_outputs import LeavingResults, is_outermost


class CompiledGraph:
    """Compiled code, called with the inputs of Dynamo's graph.

    `slots`: copies of weights, appended to the inputs, up to date. `second`: stores the inputs of each call, so that
    gradients can be differentiated again. `written`: inputs that the graph writes to without a version bump; their
    copies are stale afterwards. `leaving`: results that were widened for the outermost callable; if another frame
    called the graph, they are cast back, without loss. `sharded`: inputs that are weights which FSDP gathers under a
    shard policy, and who reads them in float32; empty: only copies are read.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        options: Options,
        slots: Sequence[Slot] = (),
        second: DoubleBackward | None = None,
        written: Sequence[int] = (),
        leaving: LeavingResults | None = None,
        sharded: Mapping[int, str] | None = None,
    ) -> None:
        self._compiled, self._slots, self._written, self._leaving = compiled, slots, written, leaving
        self._call = None if second is None else second.call
        kept = [slot for slot in slots if not slot.gathered]
        self._weights = [slot.weight for slot in kept]
        self._binding = _bind(kept, options) if kept else None
        self._sharded = sharded or {}

    def installed(self) -> Callable[..., Any]:
        """Return the callable to install: the compiled code itself if a call has nothing to do but run it."""
        needed = self._slots or self._call is not None or self._written or self._leaving is not None
        if self._sharded:
            return self._unseen_by_weights
        return self if needed else self._compiled

    def _unseen_by_weights(self, *args: Any) -> Any:
        """Run the graph once. Sharded weights, which notice all readers, are told of its readers beforehand."""
        for i, reader in self._sharded.items():
            if reader:
                args[i].gathering.read_in_float32(reader)
        with storages.NoTorchFunction():
            return self(*args)

    def __call__(self, *args: Any) -> Any:
        """Run the graph once."""
        inputs, call = (*args, *self._copies(args)) if self._slots else args, self._call
        try:
            if call is not None:
                call.inputs = inputs
            results = self._compiled(*inputs)
        finally:
            if call is not None:
                call.inputs = None
            if self._written:
                weights.invalidate([args[i] for i in self._written])
        return results if self._leaving is None else self._leave(results, self._leaving)

    def _copies(self, args: Sequence[Any]) -> Sequence[Tensor]:
        if tracing.fakes_only():  # Dynamo's DDP splitter computes the inputs of the next part on fakes
            return [_fake_copy(args[slot.weight], slot) for slot in self._slots]
        copies = [] if self._binding is None else self._binding.copies([args[i] for i in self._weights])
        if not self._sharded:
            return copies
        kept = iter(copies)
        return [
            args[slot.weight].gathering.rounded_numbers(args[slot.weight], slot.dtype) if slot.gathered else next(kept)
            for slot in self._slots
        ]

    def _leave(self, results: Sequence[Any], leaving: LeavingResults) -> Sequence[Any]:
        if tracing.fakes_only():
            return results
        if current_call.widens and is_outermost(sys._getframe(2)):
            current_call.widened = leaving.all
            return results
        return [result.to(leaving.dtype) if i in leaving.indices else result for i, result in enumerate(results)]


def _bind(slots: Sequence[Slot], options: Options) -> weights.Binding:
    return weights.bind(
        [slot.dtype for slot in slots],
        # CUDA graphs record addresses, so copies must always be refreshed in place.
        in_place=dict(options.inductor).get("triton.cudagraphs", False),
        wide=[slot.wide for slot in slots],
        packed=[slot.blocks for slot in slots],
        on_trial=[slot.on_trial for slot in slots],
    )


def _fake_copy(weight: Tensor, slot: Slot) -> Tensor:
    held = torch.float32 if slot.wide else slot.dtype
    copy = torch.empty_like(weight, dtype=held, requires_grad=False)
    return copy if slot.blocks is None else copy.contiguous()
