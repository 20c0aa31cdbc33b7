"""After differentiation: gather, copy and join 16-bit numbers as they are, and widen them where they are read.

Autocast resizes images in float32, and joins float32 with 16-bit values in float32: the same numbers, but twice the
bytes are written, read, and kept for backward. Sums of gradients are explicit here, so nothing else changes.
"""

from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import LOW, is_lossless
from ampcompile.passes.analysis.aliasing import base_of, overwritten_inputs
from ampcompile.passes.analysis.commuting import (
    CONVERT,
    cast_dtypes,
    classify_movement,
    constants_survive,
    look_through,
    rebuild,
    same_layout,
)
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, JOINS, has, is_view
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import call_on_values, insert_call, replace_node

_Source = tuple[Node, list[Node]]


def _source(operand: Node, written: set[Node]) -> _Source | None:
    """The 16-bit value that an operand was widened from, and the views after the cast; a 16-bit operand, as some joins
    have, is its own source. None without one, and for an input that is written."""
    if operand.meta["val"].dtype in LOW:
        return None if base_of(operand) in written else (operand, [])
    operand, views = look_through(operand, lambda node: is_view(node.target) and classify_movement(node))
    dtypes = cast_dtypes(operand)
    if dtypes is None or dtypes[0] not in LOW or not is_lossless(*dtypes) or base_of(operand.args[0]) in written:
        return None
    return operand.args[0], views


def _widen_late(graph: Graph, node: Node, written: set[Node]) -> bool:
    joins = has(node.target, JOINS)
    if is_view(node.target) or not (joins or classify_movement(node) in ("moves", "repeats")):
        return False
    operands = list(node.args[0]) if joins else [node.args[0]]
    sources = [source for operand in operands if isinstance(operand, Node) and (source := _source(operand, written))]
    dtypes = {source.meta["val"].dtype for source, _ in sources} - {node.meta["val"].dtype}
    if len(sources) < len(operands) or len(dtypes) != 1 or not constants_survive(node, *dtypes):
        return False
    with graph.inserting_before(node):
        parts = [rebuild(views, source) for source, views in sources]
        low = graph.node_copy(node)
        low.update_arg(0, parts if joins else parts[0])
        low.meta["val"] = call_on_values(low)
        if not same_layout(low.meta["val"], node.meta["val"]):
            graph.erase_node(low)
            return False
        wide = insert_call(graph, CONVERT, low, node.meta["val"].dtype, like=node)
    replace_node(node, wide)
    for narrowed in [user for user in wide.users if has(user.target, CONVERSIONS_AFTER)]:
        if narrowed.meta["val"].dtype is low.meta["val"].dtype and same_layout(narrowed.meta["val"], low.meta["val"]):
            replace_node(narrowed, low)
    return True


@dataclass(frozen=True)
class WidenLate(EachGraph):
    """For a joint or inference graph, which writes only inputs, at its end. Returns the number of ops moved."""

    name = "widen_late"

    def rewrite(self, gm: GraphModule) -> int:
        written = overwritten_inputs(gm.graph)
        return sum(_widen_late(gm.graph, node, written) for node in list(gm.graph.nodes) if node.op == "call_function")
