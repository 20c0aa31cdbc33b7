"""After differentiation, on a GPU: write the gradients of weights in the float32 in which their products are summed.

Autograd multiplies 16-bit matrices, rounds the product to 16 bits, and the backward of the weight's cast widens it.
Written as float32 at once, the gradient loses no bit, a float16 gradient doesn't overflow, and no kernel reads 2 and
writes 4 bytes an element to widen it. Only products that are used for a returned gradient alone are changed: those of
forward, and those in the middle of backward, keep the roundings of eager autocast. So do large ones of odd sizes, as of
50257 classes: Inductor pads their operands if they have 16 bits, without which they take several times as long.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ampcompile.passes.analysis.commuting import classify_movement, look_through, rebuild
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has
from ampcompile.passes.analysis.readers import computed_from_gradients
from ampcompile.passes.base import Pass
from ampcompile.torch_private import dispatcher, tracing

aten = torch.ops.aten
LARGE = 2**20  # numbers of a product that is worth padding
_IN_FLOAT32 = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def _returned_casts(graph: Graph) -> Iterator[Node]:
    """Yield casts to float32 whose result is only returned, or is only a term of a sum that is only returned."""
    ends = {graph.output_node()}
    for node in reversed(graph.nodes):
        if not ends.issuperset(node.users):
            continue
        if has(node.target, CONVERSIONS_AFTER):
            if node.meta["val"].dtype is torch.float32:
                yield node
        elif classify_movement(node) == "moves" or node.target is aten.add.Tensor:
            ends.add(node)


def _find_product(cast: Node) -> list[Node]:
    """The 16-bit product that only this cast reads, then the ops between that move its numbers, in order."""

    def moves(node: Node) -> bool:
        return len(node.users) == 1 and classify_movement(node) == "moves"

    product, moved = look_through(cast.args[0], moves)
    if not isinstance(product, Node) or len(product.users) > 1 or product.target not in _IN_FLOAT32:
        return []
    value, wide = product.meta["val"], cast.meta["val"]
    return [product, *moved] if value.itemsize == 2 and value.device == wide.device else []


def _widen(graph: Graph, path: list[Node], cast: Node) -> None:
    product, moved = path[0], path[1:]
    with graph.inserting_before(cast):
        wide = graph.call_function(_IN_FLOAT32[product.target], (*product.args, torch.float32))
        wide.meta = {**product.meta, "val": product.meta["val"].to(torch.float32)}
        cast.replace_all_uses_with(rebuild(moved, wide))
    for unused in (cast, *reversed(path)):
        graph.erase_node(unused)


@dataclass(frozen=True)
class WidenWeightGradients(Pass):
    """For a joint graph; an inference graph has no gradients. Returns the number of products that write float32.

    `wide`: the types of such products that run in float32 on the CPU; their float32 results are returned unrounded.
    """

    wide: frozenset[torch.dtype] = frozenset()
    name = "widen_weight_gradients"
    exact = False  # gradients of weights keep the bits that a rounding to 16 bits would drop

    def apply(self, gm: GraphModule) -> int:
        backward, widened = computed_from_gradients(gm), 0
        with tracing.on_fakes_of(gm), torch.no_grad():
            for cast in list(_returned_casts(gm.graph)):
                path = _find_product(cast)
                if path and path[0] in backward and self._may_write_float32(path[0].meta["val"]):
                    _widen(gm.graph, path, cast)
                    widened += 1
        return widened

    def _may_write_float32(self, product: torch.Tensor) -> bool:
        wide = product.device.type == "cpu" and product.dtype in self.wide
        odd = any(statically_known_true(size % 8 != 0) for size in product.shape[-2:])
        padded = odd and statically_known_true(product.numel() >= LARGE)
        return wide or (dispatcher.multiplies_into_float32(product.device) and not padded)
