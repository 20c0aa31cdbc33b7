"""The callable that Dynamo installs for one graph: it runs the compiled code, and does our work around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ampcompile import weights
from ampcompile.config import Options
from ampcompile.torch_private import compilations, storages, tracing
from ampcompile.weights import CopySpec
from ampcompile.weights.store import store, whole_reads

from .double_backward import DoubleBackward

if TYPE_CHECKING:
    from .watched_graph import WatchedGraph


@dataclass(eq=False)
class CompiledGraph:
    """Compiled code, called with the inputs of Dynamo's graph."""

    compiled: Callable[..., Any]
    options: Options
    sharded: Mapping[int, str]
    """By the index of each weight that FSDP gathers under a shard policy, what in the graph reads it in float32; empty:
    only its rounded numbers are read"""
    whole: Sequence[int]
    """Indices of the weights that the graph reads themselves, not only copies of them"""
    specs: Sequence[CopySpec] = ()
    """Copies of weights, appended to the inputs, up to date"""
    second: DoubleBackward | None = None
    """Stores the inputs of each call, so that gradients can be differentiated again"""
    written: Sequence[int] = ()
    """Inputs that the graph writes to without a version bump; their copies are stale afterwards"""
    watched: WatchedGraph | None = None
    """Keeps the magnitudes that the graph returns last"""
    again: Sequence[int] = ()
    """Indices of the weights that backward may read again to compute what a budget left out"""
    keeper: type[weights.Binding] = weights.Binding
    """The class that keeps the copies"""

    def __post_init__(self) -> None:
        # CUDA graphs record addresses, so copies must always be refreshed in place.
        in_place = compilations.makes_cuda_graphs(dict(self.options.inductor))
        kept = [spec for spec in self.specs if not spec.gathered]
        self.binding = self.keeper(kept, in_place, self.whole) if kept else None
        self._call = None if self.second is None else self.second.call

    def installed(self, inputs: Sequence[Any] = ()) -> Callable[..., Any]:
        """Return the callable to install: the compiled code itself if a call has nothing to do but run it."""
        if self.whole and self.binding is None:
            self._whole_reads = whole_reads(inputs[i] for i in self.whole)
            store.without_copies.add(self)
        if self.sharded:
            return self._unseen_by_weights
        work = self.binding or self.second or self.written or self.whole or self.watched or self.again
        return self if work else self.compiled

    def whole_reads(self) -> dict[int, Any]:
        """The weights that a graph without copies was compiled for and reads: see the function `whole_reads`."""
        return self._whole_reads

    def _unseen_by_weights(self, *args: Any) -> Any:
        """Run the graph once. Sharded weights, which notice all readers, are told of its readers beforehand."""
        for i, reader in self.sharded.items():
            if reader:
                args[i].gathering.read_whole(reader)
        with storages.NoTorchFunction():
            return self(*args)

    def __call__(self, *args: Any) -> Any:
        """Run the graph once."""
        inputs, call = (*args, *self._copies(args)) if self.specs else args, self._call
        if self.again and torch.is_grad_enabled() and not tracing.fakes_only():
            weights.refuse_late_reads(args[i] for i in self.again)
        if self.watched is not None:
            inputs = (*inputs, self.watched.slots)
        try:
            if call is not None:
                call.inputs = inputs
            results = self.compiled(*inputs)
        finally:
            if call is not None:
                call.inputs = None
            if self.written:
                weights.invalidate([args[i] for i in self.written])
        if self.watched is not None:
            *results, magnitudes = results
            if not tracing.fakes_only():
                self.watched.record(magnitudes)
        return results

    def _copies(self, args: Sequence[Any]) -> Sequence[Any]:
        if tracing.fakes_only():  # Dynamo's DDP splitter computes the inputs of the next part on fakes
            return [spec.empty_like(storages.local_part(args[spec.weight])) for spec in self.specs]
        copies = [] if self.binding is None else self.binding.copies(args)
        if not self.sharded:
            return copies
        kept, quantized = iter(copies), dict[Any, Any]()
        return [
            args[spec.weight].gathering.rounded_numbers(spec.form, spec.unquantized, quantized)
            if spec.gathered
            else next(kept)
            for spec in self.specs
        ]
