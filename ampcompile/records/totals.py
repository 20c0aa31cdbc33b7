"""Count the conversions between floating dtypes of a graph in one call, and those of eager autocast.

Those around products that a CPU runs in float32 don't count: Inductor makes them part of the kernels beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import short_name
from ampcompile.passes.analysis.op_traits import CONVERSIONS, has, is_view
from ampcompile.passes.analysis.sizes import elements_hint
from ampcompile.passes.graph import decision_of, graphs, held_tensors, module_path, op_name, source_line
from ampcompile.torch_private import dispatcher, pytree, tracing
from ampcompile.torch_private.types import HigherOrderOperator, OpOverload, TorchDispatchMode

EAGER_FORWARD, EAGER_BACKWARD = "eager autocast, forward", "eager autocast, backward"
"""The stages of `eager_totals`."""
JOINT = "forward and backward"
"""The end of the names of stages after differentiation."""


@dataclass(frozen=True)
class Total:
    """Conversions of one call at one stage, the user's own included. `bytes`: read and written by them."""

    stage: str
    casts: int
    bytes: int


@dataclass(frozen=True)
class JointCast:
    """A conversion between floating dtypes in a graph after differentiation."""

    of: str
    """The op whose result it converts, as `aten.mm`; the name of an input."""
    dtypes: str
    """Both dtypes, as `f32>bf16`."""
    shape: tuple[int | str, ...]
    bytes: int
    module: str
    source: str
    backward: bool
    """True if it runs in backward."""


def joint_casts(gm: GraphModule) -> Iterator[JointCast]:
    """Yield the conversions of a graph after differentiation: what depends on gradients runs in backward."""
    backward: set[Node] = set()
    for node in gm.graph.nodes:
        if str(node.target).startswith("tangents") or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    for node, before, after in _conversions(gm):
        dtypes = f"{short_name(before.dtype)}>{short_name(after.dtype)}"
        shape = tuple(size if isinstance(size, int) else str(size) for size in after.shape)
        made = node.args[0]
        while is_view(made.target) or has(made.target, CONVERSIONS):
            made = made.args[0]
        of, size = op_name(made.target), bytes_of(before, after)
        yield JointCast(of, dtypes, shape, size, module_path(node), source_line(node), node in backward)


def total_of(stage: str, gm: GraphModule) -> Total:
    """The conversions of a graph and its bodies."""
    sizes = [bytes_of(before, after) for graph in graphs(gm) for _, before, after in _conversions(graph)]
    return Total(stage, len(sizes), sum(sizes))


def eager_totals(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Total]:
    """Count eager autocast's conversions, forward and backward, by running a Dynamo graph on fake tensors.

    The run uses the ambient autocast state, with autocast's cache of weight casts on, as in `torch.autocast`.
    """
    fakes, mode = tracing.fake_inputs(example_inputs)
    held: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in held_tensors(gm).items()}
    cached, watched = torch.is_autocast_cache_enabled(), _ConversionCounter()
    torch.set_autocast_cache_enabled(True)
    try:
        with tracing.computing_on(mode), watched, torch.random.fork_rng([]):
            results = torch.func.functional_call(gm, held, tuple(fakes))
            forward = watched.total(EAGER_FORWARD)
            watched.sizes.clear()
            _backward(results, fakes)
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cached)
    return [forward, watched.total(EAGER_BACKWARD)]


def _backward(results: Any, inputs: Sequence[Any]) -> None:
    reached = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    if reached and wanted:
        torch.autograd.grad(reached, wanted, [torch.ones_like(r) for r in reached], allow_unused=True)


class _ConversionCounter(TorchDispatchMode):
    """Records the bytes of every conversion between floating dtypes, also in bodies of higher-order ops."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*pytree.tree_map_only(GraphModule, self._watch, args), **(kwargs or {}))
        result = dispatcher.as_computed(func, args, func(*args, **(kwargs or {})))
        if has(func, CONVERSIONS) and _converts(args[0], result):
            self.sizes.append(bytes_of(args[0], result))
        return result

    def _watch(self, body: GraphModule) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            with self:
                return body(*args)

        return watched

    def total(self, stage: str) -> Total:
        return Total(stage, len(self.sizes), sum(self.sizes))


def _conversions(gm: GraphModule) -> Iterator[tuple[Node, torch.Tensor, torch.Tensor]]:
    for node in gm.graph.nodes:
        if has(node.target, CONVERSIONS) and not decision_of(node).widened:
            before, after = _value(node.args[0]), _value(node)
            if _converts(before, after):
                yield node, before, after


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _converts(before: Any, after: Any) -> bool:
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.is_floating_point()
        and after.is_floating_point()
        and before.dtype != after.dtype
    )


def bytes_of(before: torch.Tensor, after: torch.Tensor) -> int:
    """Bytes that a conversion reads and writes, with traced sizes; 0 if the sizes depend on data."""
    return (elements_hint(before) or 0) * (before.dtype.itemsize + after.dtype.itemsize)
