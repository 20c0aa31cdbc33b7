"""After differentiation, on a GPU: write a product's operand in 16 bits from the kernel that computes it.

And compute its sum for the bias there.

Inductor's kernels run over the shape in which a value is read. Linear layers read rows, `(B * T, C)`, where norms and
activations have `(B, T, C)`; convolutions read `(B, C, H, W)`, where group norms have `(B, G, C / G, H * W)`. Without
this pass the gradient of a norm is written in float32 and read again by a kernel that only rounds it, and that of an
activation is read again to sum it for the bias. An `as_strided` forces its operand to be written before, in its own
shape. The sum of a group norm's gradient and a residual's is written the same way. Savings, counted on a GPT of 124 M,
8 x 1024: 1.7 of 26.9 GB and 48 of 215 launches; on a UNet, 8 x 64: 0.11 of 1.28 GB and 7 of 162 launches.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has, is_elementwise, is_view
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import insert_call, replace_node

DEVICE = "cuda"  # Inductor fuses CPU kernels across these shapes anyway, by comparing all their loops as one
ROWS = 128  # rows of a partial sum, as in Inductor's own sums; only the order of the additions changes
ATEN = torch.ops.aten
_RESHAPES = (ATEN.view.default, ATEN._unsafe_view.default, ATEN.reshape.default)
_TRANSPOSES = (ATEN.permute.default, ATEN.t.default, ATEN.transpose.int)
_PRODUCTS = (
    *(ATEN.mm.default, ATEN.mm.dtype, ATEN.addmm.default, ATEN.addmm.dtype),
    *(ATEN.convolution.default, ATEN.convolution_backward.default),
)
_SUM = ATEN.sum.dim_IntList


def _is_multiplied(operand: Node) -> bool:
    """True if only products and sums read a value, directly or transposed."""
    return all(
        user.target in (*_PRODUCTS, _SUM) or (user.target in _TRANSPOSES and _is_multiplied(user))
        for user in operand.users
    )


def _adds_columns(node: Node) -> bool:
    return node.target is _SUM and node.args[1:] == ([0], True)


def _reduces_rows(value: Node) -> bool:
    """True if the kernel that computes a value reduces over its rows, as the backward of a norm does."""
    seen, pending = {value}, [value]
    while pending:
        node = pending.pop()
        if is_elementwise(node.target) or is_view(node.target):
            operands = {*node.all_input_nodes} - seen
            seen |= operands
            pending += operands
        elif torch.Tag.reduction in getattr(node.target, "tags", ()):
            return True
    return False


def _before_reshapes(value: Node) -> Node:
    while value.target in _RESHAPES:
        value = value.args[0]
    return value


def _is_in_order(values: Sequence[Tensor]) -> bool:
    """True if values on a GPU have static sizes and are contiguous."""
    static = all(isinstance(size, int) for value in values for size in value.shape)
    return values[0].device.type == DEVICE and static and all(value.is_contiguous() for value in values)


def _write(graph: Graph, operand: Node) -> bool:
    producer = _before_reshapes(operand)
    if not (has(producer.target, CONVERSIONS_AFTER) or producer.target is ATEN.clone.default) or not operand.users:
        return False
    source = producer if producer.target is ATEN.clone.default else _before_reshapes(producer.args[0])
    if not is_elementwise(source.target) or not _is_multiplied(operand):
        return False
    values = [node.meta["val"] for node in (operand, producer, source)]
    size, stride = [*values[0].shape], [*values[0].stride()]
    if values[0].dtype not in LOW or not _is_in_order(values):
        return False
    adds = len(size) == 2 and size[0] % ROWS == 0 and any(map(_adds_columns, operand.users))
    with graph.inserting_before(operand):
        if adds and not _reduces_rows(source):
            low = _in_chunks(graph, source, operand)
        elif producer.target is ATEN.clone.default or (operand is producer and source is producer.args[0]):
            return False
        else:
            low = insert_call(graph, CONVERT, source, values[0].dtype)
        written = insert_call(graph, ATEN.as_strided.default, low, size, stride)
    operand.replace_all_uses_with(written)
    return True


def _add_in_producer(graph: Graph, total: Node) -> bool:
    """Add a value in memory to the gradient of a norm inside the kernel that computes the gradient, in its shape."""
    if total.target is not ATEN.add.Tensor or total.kwargs or not all(isinstance(term, Node) for term in total.args):
        return False
    for stored, producer in (total.args, reversed(total.args)):
        converted = has(producer.target, CONVERSIONS_AFTER)
        source = _before_reshapes(producer.args[0] if converted else producer)
        values = [node.meta["val"] for node in (total, stored, producer, source)]
        if not all(isinstance(value, Tensor) for value in values) or not _is_in_order(values):
            continue
        apart = all(value.shape == values[0].shape for value in values[:3]) and values[3].shape != values[0].shape
        if not apart or not _lies_in_memory(stored) or not _reduces_rows(source):
            continue
        size, stride = [*values[0].shape], [*values[0].stride()]
        with graph.inserting_before(total):
            operand = insert_call(graph, CONVERT, source, values[2].dtype) if converted else source
            operands = [operand, insert_call(graph, ATEN.reshape.default, stored, [*values[3].shape])]
            added = insert_call(graph, ATEN.add.Tensor, *(operands[::-1] if stored is total.args[0] else operands))
            replace_node(total, insert_call(graph, ATEN.as_strided.default, added, size, stride))
        return True
    return False


def _lies_in_memory(value: Node) -> bool:
    """True if a value is a product's result or operand, written for a product, an input, or one of these, widened."""
    base = _before_reshapes(value)
    if any(user.target in _PRODUCTS for node in (value, base) for user in node.users):
        return True
    if has(base.target, CONVERSIONS_AFTER):
        return _lies_in_memory(base.args[0])
    producer = base.args[0] if base.target is operator.getitem else base
    return producer.target in (*_PRODUCTS, ATEN.as_strided.default) or base.op == "placeholder"


def _in_chunks(graph: Graph, source: Node, operand: Node) -> Node:
    """The cast, in chunks of rows whose columns are summed in the kernel that computes them."""
    rows, columns = operand.meta["val"].shape
    chunks = insert_call(graph, ATEN.view.default, source, [rows // ROWS, ROWS, columns])
    dtype = operand.meta["val"].dtype
    if source.meta["val"].dtype is dtype:  # Inductor would drop a contiguous copy, but keeps two changes of sign
        low = insert_call(graph, ATEN.neg.default, insert_call(graph, ATEN.neg.default, chunks))
    else:
        low = insert_call(graph, CONVERT, chunks, dtype)
    for total in [user for user in operand.users if _adds_columns(user)]:
        partial = insert_call(graph, _SUM, insert_call(graph, CONVERT, low, torch.float32), [1])
        added = insert_call(graph, _SUM, partial, [0], True)
        replace_node(total, insert_call(graph, CONVERT, added, total.meta["val"].dtype))
    return low


@dataclass(frozen=True)
class WriteForProducts(EachGraph):
    """For a joint or inference graph. Returns the number of values written in the shape they are computed in."""

    name = "write_for_products"
    exact = False  # sums of columns are added in another order

    def rewrite(self, gm: GraphModule) -> int:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        return sum(_add_in_producer(gm.graph, node) or _write(gm.graph, node) for node in calls)
