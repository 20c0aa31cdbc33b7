"""After differentiation: count, in a watched graph, the numbers that leave the range of their type.

The statistics of forward become an output, those of backward the gradient of an input (see `passes.watch_op`).
Inductor computes them in the kernels that compute or read the values; results of library products are read once more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import LOW, short_name
from ampcompile.passes.analysis.aliasing import base_of
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, PRODUCTS_AFTER, has
from ampcompile.passes.graph import call_on_values, module_path, op_name, source_line
from ampcompile.passes.watch_op import SLOTS, WATCHED
from ampcompile.torch_private import joint_graphs, tracing
from ampcompile.torch_private.types import OpOverload

ATEN = torch.ops.aten
_MAY_OVERFLOW = frozenset(
    f"aten::{name}" for name in ["div", "reciprocal", "exp", "log", "pow", "rsqrt", "sqrt", "sum", "mean"]
)


@dataclass(frozen=True)
class WatchedValue:
    """A value whose statistics a graph computes."""

    kind: str
    """ "product", "cast", or "op" for another op that can make infinities of finite numbers."""
    op: str
    module: str
    source: str
    backward: bool
    dtype: str
    """Its dtype, as `f16`; of a cast, the dtype it casts to."""
    length: int
    """Terms of each sum of a product; 0 if unknown, and for other ops."""
    operands: tuple[int, ...]
    """Indices of the watched values that it reads, among those of its direction."""


@dataclass(frozen=True)
class RecordMagnitudes:
    """For the joint graph, or the inference graph, of a watched graph; appends each value to `values`, in order.

    Of each value: the largest finite magnitude (of a cast: of the numbers that it reads); how many numbers are
    infinite or NaN and come of finite ones (of a product: how many there are); and how many there are at all.
    """

    values: list[WatchedValue] = field(compare=False)
    name = "record_magnitudes"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        joint_graphs.name_backward_nodes(gm.graph)
        outputs = gm.graph.find_nodes(op="call_function", target=WATCHED)
        found = list(_to_watch(gm, any(backward for _, backward in (node.args for node in outputs))))
        for output in outputs:
            backward = output.args[1]
            nodes = [node for node, is_backward in found if is_backward == backward][:SLOTS]
            self.values.extend(_describe(node, backward, nodes) for node in nodes)
            with tracing.on_fakes_of(gm), gm.graph.inserting_before(gm.graph.output_node()):
                if nodes:
                    output.replace_all_uses_with(_Writer(gm.graph).statistics(nodes))
        return len(self.values)


def _to_watch(gm: GraphModule, joint: bool) -> Iterator[tuple[Node, bool]]:
    """Yield the nodes to watch and if they belong to backward, which is what depends on gradients."""
    backward: set[Node] = set()
    for node in gm.graph.nodes:
        if (joint and str(node.target).startswith("tangents")) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        if _kind(node):
            yield node, node in backward


def _kind(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not _is_never_empty(value):
        return ""
    if has(node.target, CONVERSIONS_AFTER):
        before = node.args[0].meta["val"].dtype
        return "cast" if value.dtype in LOW and before.itemsize > value.dtype.itemsize else ""
    made = node.args[0] if node.target is operator.getitem else node  # some products have several results
    if isinstance(made, Node) and has(made.target, PRODUCTS_AFTER):
        return "product"
    return "op" if has(node.target, _MAY_OVERFLOW) else ""


def _is_never_empty(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size > 0 for size in value.shape)


def _describe(node: Node, backward: bool, nodes: list[Node]) -> WatchedValue:
    value, kind = node.meta["val"], _kind(node)
    forward = {n.meta.get("seq_nr"): n for n in reversed(node.graph.nodes) if source_line(n)}
    near = node if source_line(node) else forward.get(node.meta.get("seq_nr"), node)
    operands = {base_of(operand) for operand in node.all_input_nodes}
    return WatchedValue(
        kind=kind,
        op=op_name(node.target),
        module=module_path(node) or module_path(near),
        source=source_line(near),
        backward=backward,
        dtype=short_name(value.dtype),
        length=_length(node) if kind == "product" else 0,
        operands=tuple(i for i, each in enumerate(nodes) if each in operands),
    )


def _length(product: Node) -> int:
    """The terms of each sum of a product of matrices."""
    if op_name(product.target) in ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"):
        matrices = [arg for arg in product.args if isinstance(arg, Node)][-2:]
        return int(matrices[0].meta["val"].shape[-1])
    return 0


@dataclass(frozen=True)
class _Writer:
    """Inserts calls at the insertion point of `graph`, with their fake values."""

    graph: Graph

    def statistics(self, nodes: list[Node]) -> Node:
        """The statistics of these values, [STATISTICS, SLOTS] in float32, zeros behind those that there are."""
        rows = [self._stack(row) for row in zip(*map(self._of_value, nodes), strict=True)]
        return self._call(ATEN.constant_pad_nd.default, self._stack(rows), [0, SLOTS - len(nodes)])

    def _of_value(self, node: Node) -> tuple[Node, Node, Node]:
        kind, read = _kind(node), node.args[0]
        measured = read if kind == "cast" and isinstance(read, Node) else node
        size = self._call(ATEN.abs.default, measured)
        value = size.meta["val"]
        zero = self._call(ATEN.full.default, [], 0, dtype=value.dtype, device=value.device)
        largest = self._call(ATEN.amax.default, self._call(ATEN.where.self, self._finite(measured), size, zero))
        if value.dtype != torch.float32:
            largest = self._call(CONVERT, largest, torch.float32)
        made = present = self._call(ATEN.logical_not.default, self._finite(node))
        for operand in [] if kind == "product" else _operands_like(node):
            made = self._call(ATEN.logical_and.default, made, self._finite(operand))
        return largest, self._count(made), self._count(present)

    def _finite(self, node: Node) -> Node:
        return self._call(ATEN.lt.Scalar, self._call(ATEN.abs.default, node), inf)  # NaN isn't less

    def _count(self, values: Node) -> Node:
        return self._call(ATEN.sum.default, values, dtype=torch.float32)

    def _stack(self, values: Sequence[Node]) -> Node:
        return self._call(ATEN.cat.default, [self._call(ATEN.unsqueeze.default, each, 0) for each in values], 0)

    def _call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = call_on_values(node)
        return node


def _operands_like(node: Node) -> list[Node]:
    """The operands of an op that have the shape of its result."""
    return [each for each in node.all_input_nodes if each.meta["val"].shape == node.meta["val"].shape]
