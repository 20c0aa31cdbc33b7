"""The callable that Dynamo installs for one graph: it runs the compiled code, and does our work around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class CompiledGraph:
    """Compiled code, called with the inputs of Dynamo's graph.

    `specs`: copies of weights, appended to the inputs, up to date. `second`: stores the inputs of each call, so that
    gradients can be differentiated again. `written`: inputs that the graph writes to without a version bump; their
    copies are stale afterwards. `watched`: keeps the magnitudes that the graph returns last.
    `sharded`: by the index of each weight that FSDP gathers under a shard policy, what in the graph reads it in
    float32; empty: only its rounded numbers are read. `whole`: indices of the weights that the graph reads themselves,
    not only copies of them. `again`: indices of the weights that backward may read again to compute what a budget left
    out. `binding`: the class that keeps the copies.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        options: Options,
        specs: Sequence[CopySpec] = (),
        second: DoubleBackward | None = None,
        written: Sequence[int] = (),
        watched: WatchedGraph | None = None,
        sharded: Mapping[int, str] | None = None,
        whole: Sequence[int] = (),
        again: Sequence[int] = (),
        binding: type[weights.Binding] = weights.Binding,
    ) -> None:
        self._compiled, self._specs, self._written = compiled, specs, written
        self._watched, self._whole, self._again = watched, whole, again
        self._call = None if second is None else second.call
        self._sharded = sharded or {}
        # CUDA graphs record addresses, so copies must always be refreshed in place.
        in_place = compilations.makes_cuda_graphs(dict(options.inductor))
        kept = [spec for spec in specs if not spec.gathered]
        self._binding = binding(kept, in_place, whole) if kept else None

    def installed(self, inputs: Sequence[Any] = ()) -> Callable[..., Any]:
        """Return the callable to install: the compiled code itself if a call has nothing to do but run it."""
        if self._whole and self._binding is None:
            self._whole_reads = whole_reads(inputs[i] for i in self._whole)
            store.without_copies.add(self)
        if self._sharded:
            return self._unseen_by_weights
        work = self._binding or self._call or self._written or self._whole or self._watched or self._again
        return self if work else self._compiled

    def whole_reads(self) -> dict[int, Any]:
        """The weights that a graph without copies was compiled for and reads: see the function `whole_reads`."""
        return self._whole_reads

    def _unseen_by_weights(self, *args: Any) -> Any:
        """Run the graph once. Sharded weights, which notice all readers, are told of its readers beforehand."""
        for i, reader in self._sharded.items():
            if reader:
                args[i].gathering.read_whole(reader)
        with storages.NoTorchFunction():
            return self(*args)

    def __call__(self, *args: Any) -> Any:
        """Run the graph once."""
        inputs, call = (*args, *self._copies(args)) if self._specs else args, self._call
        if self._again and torch.is_grad_enabled() and not tracing.fakes_only():
            weights.refuse_late_reads(args[i] for i in self._again)
        if self._watched is not None:
            inputs = (*inputs, self._watched.slots)
        try:
            if call is not None:
                call.inputs = inputs
            results = self._compiled(*inputs)
        finally:
            if call is not None:
                call.inputs = None
            if self._written:
                weights.invalidate([args[i] for i in self._written])
        if self._watched is not None:
            *results, magnitudes = results
            if not tracing.fakes_only():
                self._watched.record(magnitudes)
        return results

    def _copies(self, args: Sequence[Any]) -> Sequence[Any]:
        if tracing.fakes_only():  # Dynamo's DDP splitter computes the inputs of the next part on fakes
            return [spec.empty_like(storages.local_part(args[spec.weight])) for spec in self._specs]
        copies = [] if self._binding is None else self._binding.copies(args)
        if not self._sharded:
            return copies
        kept, quantized = iter(copies), dict[Any, Any]()
        return [
            args[spec.weight].gathering.rounded_numbers(spec.form, spec.unquantized, quantized)
            if spec.gathered
            else next(kept)
            for spec in self._specs
        ]
