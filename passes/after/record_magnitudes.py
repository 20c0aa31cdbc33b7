"""After differentiation: compute, in a watched graph, the magnitudes of values that may leave the range of their type.

Forward returns its magnitudes as an output, backward as the gradient of an input. Before this pass, the op `watched`
stands for both.
Inductor computes them in the loops that compute or read the values.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import LOW, short_name
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, PRODUCTS_AFTER, has
from ampcompile.passes.analysis.readers import (
    computed_from_gradients,
    is_of_product,
    is_of_softmax,
    operands_of,
    origin,
    place_of_magnitude,
    producer,
)
from ampcompile.passes.base import Pass
from ampcompile.passes.graph import call_on_values, module_path, op_name, source_line
from ampcompile.torch_private import compiled_functions, tracing
from ampcompile.torch_private.dispatcher import OpOverload

ATEN = torch.ops.aten
# Ops that may make infinite numbers of finite ones: in any type, and in 16 bits, where adding and multiplying may too.
_LEAVE_RANGE = frozenset(f"aten::{name}" for name in ["div", "reciprocal", "exp", "log", "pow", "rsqrt", "sqrt"])
_SUMS_INTO = ["embedding_dense_backward", "index_add", "index_put", "_unsafe_index_put", "scatter_add"]
_LEAVE_LOW_RANGE = _LEAVE_RANGE | frozenset(
    f"aten::{name}"
    for name in ["add", "sub", "mul", "addcmul", "addcdiv", "sum", "mean", "cumsum", "prod", "square", *_SUMS_INTO]
)
SLOTS = 1024  # values that one graph can watch in each direction


@torch.library.custom_op("ampcompile::watched", mutates_args=())
def watched(slots: torch.Tensor, backward: bool) -> torch.Tensor:
    """The magnitudes of forward, or of backward: `RecordMagnitudes` replaces the op by what computes them.

    Its gradient is the op again, so that backward returns its magnitudes as the gradient of `slots`. Where autograd
    itself differentiates the graph, the op runs, and returns `slots`, which are zeros.
    """
    return slots.clone()


@watched.register_fake
def _(slots: torch.Tensor, backward: bool) -> torch.Tensor:
    return torch.empty_like(slots)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return watched(grad, True), None


watched.register_autograd(_backward)
WATCHED = torch.ops.ampcompile.watched.default


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
    """Indices of the watched values that it reads, among those of its direction."""


@dataclass(frozen=True)
class RecordMagnitudes(Pass):
    """For the joint graph, or the inference graph, of a watched graph; appends each value to `values`, in order.

    The magnitude of a product is the largest in its result, infinite or NaN if a number there is. Of other ops, only
    results of finite operands count. Of a cast, it is the largest finite one among the numbers that it reads.
    """

    values: list[WatchedValue] = field(compare=False)
    name = "record_magnitudes"

    def apply(self, gm: GraphModule) -> int:
        compiled_functions.name_backward_nodes(gm.graph)
        outputs = {bool(node.args[1]): node for node in gm.graph.find_nodes(op="call_function", target=WATCHED)}
        forward = _read_by_results(gm)
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        products = [node for node in order if has(node.target, PRODUCTS_AFTER)]
        for direction, output in outputs.items():
            own = (node for node in order if (node not in forward) == direction)
            nodes = [node for node in own if _kind(node, direction)][:SLOTS]
            index, lines = {node: i for i, node in enumerate(nodes)}, _lines(gm)
            self.values.extend(_describe(node, direction, index, lines) for node in nodes)
            if nodes:
                places = {node: place_of_magnitude(node, order, products) for node in nodes}
                with tracing.on_fakes_of(gm):
                    output.replace_all_uses_with(_Writer(gm.graph).magnitudes(places))
        return len(self.values)


def _read_by_results(gm: GraphModule) -> set[Node]:
    """The nodes that forward computes: all that its results depend on. What gradients reach belongs to backward."""
    backward, read = computed_from_gradients(gm), set[Node]()
    pending = [node for node in gm.graph.output_node().all_input_nodes if node not in backward]
    while pending:
        if (node := pending.pop()) not in read:
            read.add(node)
            pending += node.all_input_nodes
    return read


def _kind(node: Node, backward: bool = False) -> str:
    """The kind of a value to watch, else "".

    Float32 ops of backward aren't watched: torch's formulas for derivatives keep finite numbers finite there.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return ""
    if not all(tracing.is_at_least(size, 1) for size in value.shape):
        return ""
    low = value.dtype in LOW
    if has(node.target, CONVERSIONS_AFTER):
        return "cast" if low and node.all_input_nodes[0].meta["val"].itemsize > value.itemsize else ""
    if is_of_product(node):
        return "product" if low else ""  # where it is rounded later, the cast is watched
    leaves = has(node.target, _LEAVE_LOW_RANGE if low else frozenset() if backward else _LEAVE_RANGE)
    return "op" if leaves and not is_of_softmax(node) else ""


def _describe(node: Node, backward: bool, index: dict[Node, int], lines: dict[Any, Node]) -> WatchedValue:
    near = node if source_line(node) else lines.get(node.meta.get("seq_nr"), node)
    read = [origin(operand, index) for operand in producer(node).all_input_nodes]
    return WatchedValue(
        kind=_kind(node),
        op=op_name(node.target),
        module=module_path(node) or module_path(near),
        source=source_line(near),
        backward=backward,
        dtype=short_name(node.meta["val"].dtype),
        operands=tuple(index[operand] for operand in read if operand in index),
    )


def _lines(gm: GraphModule) -> dict[Any, Node]:
    """For each op of forward, by autograd's number, a node with the user's line; backward has the same numbers."""
    return {node.meta.get("seq_nr"): node for node in reversed(gm.graph.nodes) if source_line(node)}


@dataclass
class _Writer:
    """Inserts calls at the insertion point of `graph`, with their fake values."""

    graph: Graph
    of: Node | None = None  # the value whose magnitude is being computed

    def magnitudes(self, places: dict[Node, Node]) -> Node:
        """The magnitudes of values in a float32 tensor of shape [SLOTS], then zeros.

        `places`: for each value the node before which its magnitude is computed.
        """
        rows = []
        for self.of, place in places.items():
            with self.graph.inserting_before(place):
                rows.append(self._call(ATEN.unsqueeze.default, self._largest(self.of), 0))
        self.of = None
        with self.graph.inserting_before(self.graph.output_node()):
            together = self._call(ATEN.cat.default, rows, 0)
            return self._call(ATEN.constant_pad_nd.default, together, [0, SLOTS - len(rows)])

    def _largest(self, node: Node) -> Node:
        size = self._call(ATEN.abs.default, node.all_input_nodes[0] if _kind(node) == "cast" else node)
        value = size.meta["val"]
        for operand in operands_of(node) if not is_of_product(node) else ():
            if operand.meta["val"].shape == value.shape and operand.meta["val"].is_floating_point():
                finite = self._call(ATEN.lt.Scalar, self._call(ATEN.abs.default, operand), math.inf)  # NaN isn't less
                zero = self._call(ATEN.full.default, [], 0, dtype=value.dtype, device=value.device)
                size = self._call(ATEN.where.self, finite, size, zero)
        largest = self._call(ATEN.amax.default, size)
        return largest if value.dtype == torch.float32 else self._call(CONVERT, largest, torch.float32)

    def _call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Insert a call at the user's line of the value; what is marked there, such as what to save, isn't meant."""
        node = self.graph.call_function(target, args, kwargs)
        place = self.of.meta if self.of is not None else {}
        node.meta = {name: place[name] for name in ("stack_trace", "nn_module_stack") if name in place}
        node.meta["val"] = call_on_values(node)
        return node
