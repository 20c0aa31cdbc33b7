"""Conversions between floating dtypes, counted: those of a graph in one call, and those of eager autocast.

Those around products that a CPU runs in float32 don't count: Inductor makes them part of the kernels beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.op_traits import CONVERSIONS, has
from ampcompile.passes.analysis.sizes import elements_hint
from ampcompile.passes.graph import decision_of, graphs, held_tensors
from ampcompile.torch_private import dispatcher, pytree, tracing
from ampcompile.torch_private.types import HigherOrderOperator, TorchDispatchMode

from .records import EAGER_BACKWARD, EAGER_FORWARD, Total


def total_of(stage: str, gm: GraphModule) -> Total:
    """The conversions of a graph and its bodies."""
    nodes = [node for graph in graphs(gm) for node in conversions(graph)]
    return Total(stage, len(nodes), sum(bytes_of(node.args[0].meta["val"], node.meta["val"]) for node in nodes))


def conversions(gm: GraphModule) -> Iterator[Any]:
    """Yield the nodes of a graph that convert a tensor from one floating dtype to another."""
    for node in gm.graph.nodes:
        if has(node.target, CONVERSIONS) and not decision_of(node).widened:
            before = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
            if _converts(before, node.meta.get("val")):
                yield node


def _converts(before: Any, after: Any) -> bool:
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return tensors and before.is_floating_point() and after.is_floating_point() and before.dtype != after.dtype


def bytes_of(before: torch.Tensor, after: torch.Tensor) -> int:
    """Bytes that a conversion reads and writes, with traced sizes; 0 if the sizes depend on data."""
    return (elements_hint(before) or 0) * (before.dtype.itemsize + after.dtype.itemsize)


def eager_totals(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Total]:
    """Count eager autocast's conversions, forward and backward, by running a Dynamo graph on fake tensors.

    The run uses the ambient autocast state, with autocast's cache of weight casts on, as in `torch.autocast`.
    """
    fakes, mode = tracing.fake_inputs(example_inputs)
    held: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in held_tensors(gm).items()}
    cached, forward, backward = torch.is_autocast_cache_enabled(), _ConversionCounter(), _ConversionCounter()
    torch.set_autocast_cache_enabled(True)
    try:
        with tracing.computing_on(mode), torch.random.fork_rng([]):
            with forward:
                results = torch.func.functional_call(gm, held, tuple(fakes))
            leaves, wanted = (
                [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
                for values in (pytree.tree_leaves(results), fakes)
            )
            if leaves and wanted:
                with backward:
                    torch.autograd.grad(leaves, wanted, [torch.ones_like(r) for r in leaves], allow_unused=True)
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cached)
    stages = (EAGER_FORWARD, forward.sizes), (EAGER_BACKWARD, backward.sizes)
    return [Total(stage, len(sizes), sum(sizes)) for stage, sizes in stages]


class _ConversionCounter(TorchDispatchMode):
    """Notes the bytes of every conversion between floating dtypes, also in bodies of higher-order ops."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*pytree.tree_map_only(GraphModule, self._count_in, args), **(kwargs or {}))
        result = dispatcher.as_computed(func, args, func(*args, **(kwargs or {})))
        if has(func, CONVERSIONS) and _converts(args[0], result):
            self.sizes.append(bytes_of(args[0], result))
        return result

    def _count_in(self, body: GraphModule) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with self:
                return body(*args)

        return counted
