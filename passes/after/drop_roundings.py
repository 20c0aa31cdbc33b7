"""Don't round twice: ops that choose among 16-bit numbers, or change a sign, return 16-bit numbers unrounded.

With `numerics="eager"` Inductor rounds the operands and results of each op on 16-bit numbers, as separate kernels
would, also in a loop with others. In loops that aren't vectorized the roundings take longer than the ops.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.op_traits import CHOOSES_AFTER, PRODUCTS_AFTER, has, is_elementwise, is_view, reads_bits
from ampcompile.passes.analysis.sizes import is_float_tensor
from ampcompile.passes.graph import graphs
from ampcompile.torch_private import lowering


def _drop_in(gm: GraphModule) -> int:
    exact: set[Node] = set()
    for node in gm.graph.nodes:
        if lowering.ROUNDS in node.meta and has(node.target, CHOOSES_AFTER):
            numbers = [operand for operand in node.all_input_nodes if is_float_tensor(operand.meta.get("val"))]
            one_type = all(operand.meta["val"].dtype == node.meta["val"].dtype for operand in numbers)
            if one_type and all(_is_rounded(operand, exact) for operand in numbers):
                del node.meta[lowering.ROUNDS]
                exact.add(node)
    return len(exact)


def _is_rounded(node: Node, exact: set[Node]) -> bool:
    """True if a 16-bit value is exactly representable in 16 bits, also inside the loop that computes it."""
    if node.op == "placeholder" or node in exact:
        return True
    if node.target is operator.getitem or (is_view(node.target) and not reads_bits(node.target)):
        source = node.args[0]
        assert isinstance(source, Node)
        return _is_rounded(source, exact)
    if has(node.target, PRODUCTS_AFTER):
        return lowering.stores_products()
    return is_elementwise(node.target) and lowering.ROUNDS in node.meta


@dataclass(frozen=True)
class DropRoundings:
    """Removes Inductor's rounding mark from such ops; returns their number."""

    name = "drop_roundings"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        return sum(map(_drop_in, graphs(gm)))
