"""After differentiation: count, in a watched graph, the numbers that leave the range of their type.

The statistics of forward become an output, those of backward the gradient of an input (see `passes.watch_op`).
Inductor computes them in the kernels that compute or read the values; results of library products are read once more.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import LOW, short_name
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import (
    CHOOSES_AFTER,
    CONVERSIONS_AFTER,
    COPIES_AFTER,
    PRODUCTS_AFTER,
    has,
    is_view,
)
from ampcompile.passes.graph import call_on_values, module_path, op_name, source_line
from ampcompile.passes.watch_op import SLOTS, WATCHED
from ampcompile.torch_private import joint_graphs, tracing
from ampcompile.torch_private.types import OpOverload

ATEN = torch.ops.aten
# They may make infinite numbers of finite ones: in any type, and in 16 bits, where sums and products of two may, too.
_LEAVE_RANGE = frozenset(f"aten::{name}" for name in ["div", "reciprocal", "exp", "log", "pow", "rsqrt", "sqrt"])
_LEAVE_LOW_RANGE = frozenset(
    f"aten::{name}" for name in ["add", "sub", "mul", "addcmul", "addcdiv", "sum", "mean", "cumsum", "prod", "square"]
)
_KEEP_MAGNITUDE = CHOOSES_AFTER | CONVERSIONS_AFTER | COPIES_AFTER


@dataclass(frozen=True)
class WatchedValue:
    """A value whose statistics a graph computes."""

    kind: str
    """ "product", "cast", "input" of a product, or "op" for another op that may make infinities of finite numbers."""
    op: str
    module: str
    source: str
    backward: bool
    dtype: str
    """Its dtype, as `f16`; of a cast, the dtype it casts to."""
    operands: tuple[int, ...]
    """Indices of the watched values that it reads, among those of its direction."""
    length: int = 0
    """Terms of each sum of a product of `operands`, the two matrices; 0 if unknown, and for other ops."""


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
        outputs = {bool(node.args[1]): node for node in gm.graph.find_nodes(op="call_function", target=WATCHED)}
        backward = _reached_by_gradients(gm) if len(outputs) > 1 else set()
        for direction, output in outputs.items():
            readers = _to_watch(node for node in gm.graph.nodes if (node in backward) == direction)
            nodes, lines = [*readers][:SLOTS], _lines(gm)
            index = {node: i for i, node in enumerate(nodes)}
            self.values.extend(_describe(node, readers[node], direction, index, lines) for node in nodes)
            if nodes:
                with tracing.on_fakes_of(gm), gm.graph.inserting_before(gm.graph.output_node()):
                    output.replace_all_uses_with(_Writer(gm.graph).statistics(nodes))
        return len(self.values)


def _reached_by_gradients(gm: GraphModule) -> set[Node]:
    """The nodes of backward."""
    reached: set[Node] = set()
    for node in gm.graph.nodes:
        if str(node.target).startswith("tangents") or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def _to_watch(nodes: Iterable[Node]) -> dict[Node, Node]:
    """The values to watch, in order; an input before the first product that reads it, which is its value."""
    watched: dict[Node, Node] = {}
    for node in nodes:
        if kind := _kind(node):
            inputs = map(_origin, _matrices(node)) if kind == "product" else ()
            new = (each for each in inputs if each.op == "placeholder" and _is_watchable(each) and each not in watched)
            watched |= dict.fromkeys(new, node)
            watched[node] = node
    return watched


def _kind(node: Node) -> str:
    if not _is_watchable(node):
        return ""
    if node.op == "placeholder":
        return "input"
    low = node.meta["val"].dtype in LOW
    if has(node.target, CONVERSIONS_AFTER):
        narrows = node.all_input_nodes[0].meta["val"].itemsize > node.meta["val"].itemsize
        return "cast" if low and narrows else ""
    made = node.args[0] if node.target is operator.getitem else node  # some products have several results
    if isinstance(made, Node) and has(made.target, PRODUCTS_AFTER):
        return "product"
    return "op" if has(node.target, _LEAVE_RANGE) or (low and has(node.target, _LEAVE_LOW_RANGE)) else ""


def _is_watchable(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return all(isinstance(size, int) and size > 0 for size in value.shape)  # an empty one has no largest number


def _describe(node: Node, reader: Node, backward: bool, index: dict[Node, int], lines: dict[Any, Node]) -> WatchedValue:
    kind, matrices = _kind(node), _matrices(node)
    near = reader if source_line(reader) else lines.get(reader.meta.get("seq_nr"), reader)
    read = [_origin(each, index) for each in (matrices or node.all_input_nodes)]
    operands = tuple(index[each] for each in read if each in index and each is not node)
    known = kind == "product" and len(matrices) == len(operands) == 2
    return WatchedValue(
        kind=kind,
        op=f"an operand of {op_name(reader.target)}" if kind == "input" else op_name(node.target),
        module=module_path(reader) or module_path(near),
        source=source_line(near),
        backward=backward,
        dtype=short_name(node.meta["val"].dtype),
        operands=operands,
        length=_length(node, matrices) if known else 0,
    )


def _lines(gm: GraphModule) -> dict[Any, Node]:
    """For each op of forward, by autograd's number, a node with the user's line; backward has the same numbers."""
    return {node.meta.get("seq_nr"): node for node in reversed(gm.graph.nodes) if source_line(node)}


def _origin(value: Node, watched: Container[Node] = ()) -> Node:
    """The watched value or input whose numbers these are, in other places or types, or fewer of them."""
    while value not in watched and (is_view(value.target) or has(value.target, _KEEP_MAGNITUDE)):
        value = value.all_input_nodes[0]
    return value


_MATRICES = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1, "aten.convolution": 0}


def _matrices(node: Node) -> list[Node]:
    """Both factors of a product."""
    first = _MATRICES.get(op_name(node.target))
    return [] if first is None else [each for each in node.args[first : first + 2] if isinstance(each, Node)]


def _length(product: Node, matrices: Sequence[Node]) -> int:
    shape = matrices[1].meta["val"].shape
    return prod(shape[1:]) if op_name(product.target) == "aten.convolution" else int(shape[-2])


@dataclass(frozen=True)
class _Writer:
    """Inserts calls at the insertion point of `graph`, with their fake values."""

    graph: Graph

    def statistics(self, nodes: list[Node]) -> Node:
        """The statistics of these values, [STATISTICS, SLOTS] in float32, zeros behind those that there are."""
        rows = [self._stack(row) for row in zip(*map(self._of_value, nodes), strict=True)]
        return self._call(ATEN.constant_pad_nd.default, self._stack(rows), [0, SLOTS - len(nodes)])

    def _of_value(self, node: Node) -> tuple[Node, Node, Node]:
        kind = _kind(node)
        measured = node.all_input_nodes[0] if kind == "cast" else node
        size = self._call(ATEN.abs.default, measured)
        value = size.meta["val"]
        zero = self._call(ATEN.full.default, [], 0, dtype=value.dtype, device=value.device)
        largest = self._call(ATEN.amax.default, self._call(ATEN.where.self, self._finite(measured), size, zero))
        if value.dtype != torch.float32:
            largest = self._call(CONVERT, largest, torch.float32)
        made = present = self._call(ATEN.logical_not.default, self._finite(node))
        if kind == "input":
            made = self._call(ATEN.logical_and.default, made, self._finite(node))
        for operand in _operands_like(node) if kind in ("cast", "op") else []:
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
