"""After differentiation: compute, in a watched graph, the magnitudes of values that may leave the range of their type.

Those of forward become an output, those of backward the gradient of an input (see `passes.watch_op`).
Inductor computes them in the kernels that compute or read the values; results of library products are read once more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
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
_LEAVE_LOW_RANGE = _LEAVE_RANGE | frozenset(
    f"aten::{name}" for name in ["add", "sub", "mul", "addcmul", "addcdiv", "sum", "mean", "cumsum", "prod", "square"]
)
_KEEP_MAGNITUDE = CHOOSES_AFTER | CONVERSIONS_AFTER | COPIES_AFTER


@dataclass(frozen=True)
class WatchedValue:
    """A value whose magnitude a graph computes."""

    kind: str
    """ "product", "cast", or "op" for another op that may make infinite numbers of finite ones."""
    op: str
    module: str
    source: str
    backward: bool
    dtype: str
    """Its dtype, as `f16`; of a cast, the dtype it casts to."""
    operands: tuple[int, ...]
    """Indices of the watched values that it reads, among those of its direction; of a product, of its two factors."""
    length: int = 0
    """Terms of each sum of a product; 0 if unknown, and for other ops."""
    input_factor: tuple[int, ...] = ()
    """The shape of a product's factor that is an input of the graph, as a weight's copy is; forward alone."""


@dataclass(frozen=True)
class RecordMagnitudes:
    """For the joint graph, or the inference graph, of a watched graph; appends each value to `values`, in order.

    The magnitude of a product is the largest in its result, infinite or NaN if a number there is. Of other ops, only
    results of finite operands count. Of a cast, it is the largest finite one among the numbers that it reads.
    """

    values: list[WatchedValue] = field(compare=False)
    name = "record_magnitudes"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        joint_graphs.name_backward_nodes(gm.graph)
        outputs = {bool(node.args[1]): node for node in gm.graph.find_nodes(op="call_function", target=WATCHED)}
        forward = _read_by_results(gm)
        for direction, output in outputs.items():
            own = (node for node in gm.graph.nodes if (node not in forward) == direction)
            nodes = [node for node in own if _kind(node, direction)][:SLOTS]
            index, lines = {node: i for i, node in enumerate(nodes)}, _lines(gm)
            self.values.extend(_describe(node, direction, index, lines) for node in nodes)
            if nodes:
                with tracing.on_fakes_of(gm), gm.graph.inserting_before(gm.graph.output_node()):
                    output.replace_all_uses_with(_Writer(gm.graph).magnitudes(nodes))
        return len(self.values)


def _read_by_results(gm: GraphModule) -> set[Node]:
    """The nodes that forward computes: all that its results depend on. What gradients reach belongs to backward."""
    reached: set[Node] = set()
    for node in gm.graph.nodes:
        if str(node.target).startswith("tangents") or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    read: set[Node] = set()
    pending = [node for node in gm.graph.output_node().all_input_nodes if node not in reached]
    while pending:
        if (node := pending.pop()) not in read:
            read.add(node)
            pending += node.all_input_nodes
    return read


def _kind(node: Node, backward: bool = False) -> str:
    """The kind of a value to watch, else "". The derivatives that torch writes in float32 have no such faults."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not tracing.is_never_empty(value):
        return ""
    low = value.dtype in LOW
    if has(node.target, CONVERSIONS_AFTER):
        return "cast" if low and node.all_input_nodes[0].meta["val"].itemsize > value.itemsize else ""
    made = node.args[0] if node.target is operator.getitem else node  # some products have several results
    if isinstance(made, Node) and has(made.target, PRODUCTS_AFTER):
        return "product" if low else ""  # where it is rounded later, the cast is watched
    leaves = has(node.target, _LEAVE_LOW_RANGE if low else frozenset() if backward else _LEAVE_RANGE)
    return "op" if leaves and not _is_of_softmax(node) else ""


def _is_of_softmax(node: Node) -> bool:
    """True for `exp(x - x.amax())` and its share of a sum: at most 1, and never written to memory."""
    name, operands = op_name(node.target), node.all_input_nodes
    if name == "aten.div":
        return _is_of_softmax(operands[0])
    if name != "aten.exp" or op_name(operands[0].target) != "aten.sub":
        return False
    return op_name(_origin(operands[0].all_input_nodes[-1], ()).target) == "aten.amax"


def _describe(node: Node, backward: bool, index: dict[Node, int], lines: dict[Any, Node]) -> WatchedValue:
    kind, factors = _kind(node), _factors(node)
    near = node if source_line(node) else lines.get(node.meta.get("seq_nr"), node)
    read = [_origin(each, index) for each in (factors or node.all_input_nodes)]
    given = [each for each, origin in zip(factors, read, strict=False) if origin.op == "placeholder"]
    return WatchedValue(
        kind=kind,
        op=op_name(node.target),
        module=module_path(node) or module_path(near),
        source=source_line(near),
        backward=backward,
        dtype=short_name(node.meta["val"].dtype),
        operands=tuple(index[each] for each in read if each in index),
        length=_length(node, factors) if len(factors) == 2 else 0,
        input_factor=tuple(given[0].meta["val"].shape) if len(given) == 1 and not backward else (),
    )


def _lines(gm: GraphModule) -> dict[Any, Node]:
    """For each op of forward, by autograd's number, a node with the user's line; backward has the same numbers."""
    return {node.meta.get("seq_nr"): node for node in reversed(gm.graph.nodes) if source_line(node)}


def _origin(value: Node, watched: Container[Node]) -> Node:
    """The watched value whose numbers these are, in other places or types, or fewer of them; else their origin."""
    while value not in watched and (is_view(value.target) or has(value.target, _KEEP_MAGNITUDE)):
        value = value.all_input_nodes[0]
    return value


_FACTORS = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1, "aten.convolution": 0}


def _factors(node: Node) -> list[Node]:
    """Both factors of a product."""
    first = _FACTORS.get(op_name(node.target))
    return [] if first is None else [each for each in node.args[first : first + 2] if isinstance(each, Node)]


def _length(product: Node, factors: Sequence[Node]) -> int:
    shape = factors[1].meta["val"].shape
    return math.prod(shape[1:]) if op_name(product.target) == "aten.convolution" else int(shape[-2])


@dataclass(frozen=True)
class _Writer:
    """Inserts calls at the insertion point of `graph`, with their fake values."""

    graph: Graph

    def magnitudes(self, nodes: list[Node]) -> Node:
        """The magnitudes of these values, [SLOTS] in float32, zeros behind those that there are."""
        largest = [self._call(ATEN.unsqueeze.default, self._largest(node), 0) for node in nodes]
        return self._call(
            ATEN.constant_pad_nd.default, self._call(ATEN.cat.default, largest, 0), [0, SLOTS - len(nodes)]
        )

    def _largest(self, node: Node) -> Node:
        kind, operands = _kind(node), node.all_input_nodes
        size = self._call(ATEN.abs.default, operands[0] if kind == "cast" else node)
        value = size.meta["val"]
        for operand in operands if kind != "product" else ():
            if operand.meta["val"].shape == value.shape:
                finite = self._call(ATEN.lt.Scalar, self._call(ATEN.abs.default, operand), math.inf)  # NaN isn't less
                zero = self._call(ATEN.full.default, [], 0, dtype=value.dtype, device=value.device)
                size = self._call(ATEN.where.self, finite, size, zero)
        largest = self._call(ATEN.amax.default, size)
        return largest if value.dtype == torch.float32 else self._call(CONVERT, largest, torch.float32)

    def _call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = call_on_values(node)
        return node
