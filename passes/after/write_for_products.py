"""After differentiation, on a GPU: what products read is written, and added up, by the kernel that computes it.

Inductor's kernels run over the shape in which a value is read. Linear layers read rows, `(B * T, C)`, where norms and
activations have `(B, T, C)`; convolutions read `(B, C, H, W)`, where group norms have `(B, G, C / G, H * W)`. So the
gradient of a norm was written in float32 and read again by a kernel that only rounds it, and that of an activation was
read again to add it up for the bias. What an `as_strided` reads is written before, in its own shape. Counted on a GPT
of 124 M, 8 x 1024: 1.7 of 26.9 GB and 48 of 215 launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has, is_elementwise, is_view
from ampcompile.passes.graph import graphs, insert_call
from ampcompile.torch_private import tracing

DEVICE = "cuda"
"""Inductor's kernels for CPUs are compared over all their loops as one, and need none of this."""
ROWS = 128
"""A partial sum has so many rows, as Inductor's own do; their order is the only thing that changes."""
ATEN = torch.ops.aten
_RESHAPES = (ATEN.view.default, ATEN._unsafe_view.default, ATEN.reshape.default)
_TRANSPOSES = (ATEN.permute.default, ATEN.t.default, ATEN.transpose.int)
_PRODUCTS = (
    *(ATEN.mm.default, ATEN.mm.dtype, ATEN.addmm.default, ATEN.addmm.dtype),
    *(ATEN.convolution.default, ATEN.convolution_backward.default),
)
_SUM = ATEN.sum.dim_IntList


def _is_multiplied(operand: Node) -> bool:
    """Whether nothing but products and sums reads a value, itself or transposed."""
    return all(
        user.target in (*_PRODUCTS, _SUM) or (user.target in _TRANSPOSES and _is_multiplied(user))
        for user in operand.users
    )


def _adds_columns(node: Node) -> bool:
    return node.target is _SUM and node.args[1:] == ([0], True)


def _reduces_rows(value: Node) -> bool:
    """Whether the kernel that computes a value takes sums or the like of its rows, as the backward of a norm does."""
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


def _write(graph: Graph, operand: Node) -> bool:
    made = _before_reshapes(operand)
    if not (has(made.target, CONVERSIONS_AFTER) or made.target is ATEN.clone.default) or not operand.users:
        return False
    source = made if made.target is ATEN.clone.default else _before_reshapes(made.args[0])
    if not is_elementwise(source.target) or not _is_multiplied(operand):
        return False
    values = [node.meta["val"] for node in (operand, made, source)]
    size, stride = [*values[0].shape], [*values[0].stride()]
    static = all(isinstance(each, int) for value in values for each in value.shape)
    if values[0].device.type != DEVICE or values[0].dtype not in LOW or not static:
        return False
    if not all(value.is_contiguous() for value in values):
        return False
    adds = len(size) == 2 and size[0] % ROWS == 0 and any(map(_adds_columns, operand.users))
    with graph.inserting_before(operand):
        if adds and not _reduces_rows(source):
            low = _in_chunks(graph, source, operand)
        elif made.target is ATEN.clone.default or (operand is made and source is made.args[0]):
            return False
        else:
            low = insert_call(graph, CONVERT, source, values[0].dtype)
        written = insert_call(graph, ATEN.as_strided.default, low, size, stride)
    operand.replace_all_uses_with(written)
    return True


def _in_chunks(graph: Graph, source: Node, operand: Node) -> Node:
    """The cast of chunks of rows, whose columns are added up as they are computed."""
    rows, columns = operand.meta["val"].shape
    chunks = insert_call(graph, ATEN.view.default, source, [rows // ROWS, ROWS, columns])
    dtype = operand.meta["val"].dtype
    if source.meta["val"].dtype is dtype:  # Inductor drops a copy in order, and keeps two changes of sign
        low = insert_call(graph, ATEN.neg.default, insert_call(graph, ATEN.neg.default, chunks))
    else:
        low = insert_call(graph, CONVERT, chunks, dtype)
    for total in [user for user in operand.users if _adds_columns(user)]:
        partial = insert_call(graph, _SUM, insert_call(graph, CONVERT, low, torch.float32), [1])
        added = insert_call(graph, _SUM, partial, [0], True)
        total.replace_all_uses_with(insert_call(graph, CONVERT, added, total.meta["val"].dtype))
        graph.erase_node(total)
    return low


@dataclass(frozen=True)
class WriteForProducts:
    """For a joint or inference graph; returns how many operands of products are written where they are computed."""

    name = "write_for_products"
    exact = False  # sums of columns are taken in another order
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        with torch.no_grad():
            return sum(map(_apply, graphs(gm)))


def _apply(gm: GraphModule) -> int:
    with tracing.on_fakes_of(gm):
        return sum(_write(gm.graph, node) for node in list(gm.graph.nodes) if node.op == "call_function")
