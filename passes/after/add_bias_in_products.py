"""Let bfloat16 products of linear layers add their bias as they write their result (CPU).

ATen's `addmm` writes the bias into the result, and adds the product to that in a second pass. oneDNN's linear layer
adds it to sums that are still in registers. The bits are the same from `SMALLEST` features on.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ampcompile.kernels import packed_linear
from ampcompile.kernels.packed_linear import PACKED_LINEAR, SMALLEST
from ampcompile.passes.analysis.aliasing import is_row
from ampcompile.passes.analysis.products import is_emulated
from ampcompile.passes.base import EachGraph
from ampcompile.torch_private import lowering

ADDMM = torch.ops.aten.addmm.default
TRANSPOSES = {torch.ops.aten.permute.default: ([1, 0],), torch.ops.aten.t.default: ()}
"""And their arguments after the matrix."""


def acts_here() -> bool:
    """Return True if this CPU has units for bfloat16, and oneDNN uses them."""
    return packed_linear.available(torch.bfloat16) and not is_emulated("cpu", torch.bfloat16)


def _adds_rows(bias: Node, product: Node) -> bool:
    """True for bfloat16 on the CPU, and one number of the bias for each column."""
    result = product.meta["val"]
    return result.device.type == "cpu" and result.dtype == torch.bfloat16 and is_row(bias, result.shape[1])


def _is_plain(weight: Node) -> bool:
    """True for inputs that oneDNN reads as they are, and large enough for the same bits."""
    value = weight.meta["val"]
    return weight.op == "placeholder" and value.is_contiguous() and min(value.shape) >= SMALLEST


@dataclass(frozen=True)
class AddBiasInProducts(EachGraph):
    """Replaces `addmm` by `packed_linear` with a plain weight; returns the number of products."""

    name = "add_bias_in_products"

    def rewrite(self, gm: GraphModule) -> int:
        if not lowering.stores_products() or not acts_here():
            return 0
        changed = 0
        for node in gm.graph.find_nodes(op="call_function", target=ADDMM):
            bias, x, transposed, *_ = node.args
            if node.kwargs or not _adds_rows(bias, node) or TRANSPOSES.get(transposed.target) != transposed.args[1:]:
                continue
            weight = transposed.args[0]
            if not _is_plain(weight):
                continue
            node.target, node.args = PACKED_LINEAR, (x, weight, weight, bias)
            changed += 1
            if not transposed.users:
                gm.graph.erase_node(transposed)
        return changed
