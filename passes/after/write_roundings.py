"""After differentiation: compute ops on 16-bit numbers in float32, and write each rounding as a cast.

With `numerics="eager"` torch marks these ops, and Inductor's code for a marked op rounds its operands and its result in
registers. Some of its code doesn't look at marks (that for powers), and its patterns rebuild some ops without them or
from float32 copies: a factor before a softmax, a sum with a product. A cast is carried out wherever it stands. What
torch's decompositions compute on the way to an op's result isn't marked, and stays in float32, as in eager kernels.

Ops that choose among 16-bit numbers, or change a sign, need no rounding: in loops that aren't vectorized it takes
longer than the op.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.op_traits import (
    CHOOSES_AFTER,
    COPIES_AFTER,
    PRODUCTS_AFTER,
    has,
    is_elementwise,
    is_view,
    reads_bits,
)
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import call_on_values, erase_unread, is_float_tensor
from ampcompile.torch_private import lowering

MUL, POW = torch.ops.aten.mul.Tensor, torch.ops.aten.pow.Tensor_Scalar
_OF_THE_RESULT = ("unbacked_bindings", lowering.ROUND_AS_EAGER, lowering.WRITE_TO_MEMORY)


@dataclass
class _Writer:
    graph: Graph
    exact: set[Node] = field(default_factory=set)  # choices among 16-bit numbers, and their signs
    unrounded: dict[Node, Node] = field(default_factory=dict)  # what decompositions compute on the way, in float32

    def write(self, node: Node) -> bool:
        """Write an op's roundings; returns True if it has any."""
        low = [operand for operand in node.all_input_nodes if _is_low(operand)]
        if not isinstance(node.meta.get("val"), torch.Tensor) or not (low or _is_low(node)):
            return False
        converts = node.target is CONVERT
        if converts or (_chooses(node) and self.unrounded.keys().isdisjoint(low)):
            exact = all(map(self._is_exact, low))
            if exact or _is_marked(node):
                self.exact.add(node)
            if exact:
                _mark(node, converts and _is_low(node) and lowering.CASTS_NEED_MARKS)
            return False
        if not is_elementwise(node.target) or has(node.target, COPIES_AFTER) or lowering.calls_kernel(node.target):
            return False
        if node.target is POW and node.args[1] == 3 and _rounds_squares(node.meta["val"]):
            with self.graph.inserting_before(node):
                square = self.graph.call_function(MUL, (node.args[0], node.args[0]))
            square.meta = {**node.meta}
            self._widen(square)
            node.target, node.args = MUL, (square, node.args[0])
        self._widen(node)
        return True

    def _widen(self, node: Node) -> None:
        meta = {key: value for key, value in node.meta.items() if key not in _OF_THE_RESULT}
        if meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            del meta["recompute"]
        with self.graph.inserting_before(node):
            forms = {operand: self._in_float32(operand, meta) for operand in node.all_input_nodes}
            node.args, node.kwargs = map_arg((node.args, node.kwargs), forms.__getitem__)
            if _is_low(node):
                wide = self.graph.call_function(node.target, node.args, node.kwargs)
                wide.meta = meta | {"val": call_on_values(wide)}
                if not _is_marked(node):
                    self.unrounded[node] = wide
                node.target, node.args, node.kwargs = CONVERT, (wide, node.meta["val"].dtype), {}
        _mark(node, _is_low(node) and lowering.CASTS_NEED_MARKS)

    def _in_float32(self, operand: Node, meta: dict[str, Any]) -> Node:
        if not _is_low(operand) or operand in self.unrounded:
            return self.unrounded.get(operand, operand)
        cast = self.graph.call_function(CONVERT, (operand, torch.float32))
        cast.meta = meta | {"val": operand.meta["val"].to(torch.float32)}
        _mark(cast, not self._is_exact(operand))
        return cast

    def _is_exact(self, node: Node) -> bool:
        """True if a 16-bit value is exactly representable in 16 bits, also inside the loop that computes it."""
        if node.op == "placeholder" or node.target is CONVERT or node in self.exact:
            return True
        if node.target is operator.getitem or (is_view(node.target) and not reads_bits(node.target)):
            source = node.args[0]
            assert isinstance(source, Node)
            return self._is_exact(source)
        return has(node.target, PRODUCTS_AFTER) and lowering.stores_products()


def _is_low(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in LOW


def _is_marked(node: Node) -> bool:
    return bool(node.meta.get(lowering.ROUND_AS_EAGER))


def _mark(node: Node, marked: bool) -> None:
    node.meta[lowering.ROUND_AS_EAGER] = marked


def _chooses(node: Node) -> bool:
    """True for an op that returns one of its operands, perhaps with another sign, or compares."""
    dtype = node.meta["val"].dtype
    floats = [value for operand in node.all_input_nodes if is_float_tensor(value := operand.meta.get("val"))]
    one_type = has(node.target, CHOOSES_AFTER) and all(value.dtype is dtype for value in floats)
    return one_type or (dtype is torch.bool and is_elementwise(node.target))


def _rounds_squares(cube: torch.Tensor) -> bool:
    """True if eager's kernel rounds the square before it multiplies it once more."""
    return cube.dtype is torch.bfloat16 or (cube.dtype is torch.float16 and cube.is_cuda)


@dataclass(frozen=True)
class WriteRoundings(EachGraph):
    """For a joint or inference graph, of which Inductor makes code. Returns the number of ops rewritten."""

    name = "write_roundings"
    exact = False  # what Inductor would forget to round is rounded

    def rewrite(self, gm: GraphModule) -> int:
        written, marked = 0, any(map(_is_marked, gm.graph.nodes))
        if marked:
            writer = _Writer(gm.graph)
            written = sum(writer.write(node) for node in list(gm.graph.nodes) if node.op == "call_function")
            erase_unread([*writer.unrounded])
        if lowering.CASTS_NEED_MARKS:
            for node in gm.graph.find_nodes(op="call_function", target=CONVERT):
                saved = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
                if _is_low(node) and not node.kwargs and (saved or (marked and node.meta["val"].is_cuda)):
                    # Its pattern that drops a cast which is widened again looks for positional types alone.
                    node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
        return written
