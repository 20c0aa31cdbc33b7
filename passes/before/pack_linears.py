"""On the CPU: linear layers read their hoisted weight in the blocks that oneDNN's matrix product wants.

Packing changes no bit of a product that is worth packing. It happens once instead of at every call, so it needs a copy
that lives across calls: this pass takes the `weight_copy` reads that `hoist_weights` left in front of `aten.linear`.
It is for graphs without gradients: a weight that is trained changes before packing it has paid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.passes.analysis.aliasing import lies_in_a_row
from ampcompile.passes.graph import placeholders
from ampcompile.passes.weight_copy import WEIGHT_COPY, Slot
from ampcompile.torch_private import tracing

LINEAR = torch.ops.aten.linear.default
SMALLEST = 64
"""Fewest features in or out. Below, oneDNN adds up in another order once packed: one result in 100,000 differs in its
last bit, and nothing is gained."""


def _packable(read: object, dtypes: frozenset[torch.dtype]) -> bool:
    if not isinstance(read, Node) or read.target is not WEIGHT_COPY or len(read.users) > 1:
        return False
    copy = read.meta["val"]
    return copy.device.type == "cpu" and copy.dtype in dtypes and copy.dim() == 2 and min(copy.shape) >= SMALLEST


def _readable(bias: Node | None, weight: Node) -> bool:
    """Whether a bias is what oneDNN reads: numbers side by side, one for each of the features out."""
    return bias is None or (lies_in_a_row(bias) and str(bias.meta["val"].numel()) == str(weight.meta["val"].shape[0]))


@dataclass(frozen=True)
class PackLinears:
    """`dtypes`: what this machine multiplies packed."""

    dtypes: frozenset[torch.dtype]
    name = "pack_linears"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        inputs: dict[Slot, Node] = {}
        packed = 0
        with tracing.on_fakes_of(gm):
            for linear in gm.graph.find_nodes(op="call_function", target=LINEAR):
                x, read, bias = (*linear.args, None)[:3]
                bias = linear.kwargs.get("bias", bias)
                if not _packable(read, self.dtypes) or not _readable(bias, read):
                    continue
                weight, copy, _ = read.args
                form = self._input(gm, inputs, copy, replace(copy.meta["amp_copy"], layout="packed"))
                linear.target, linear.args = PACKED_LINEAR, (x, weight, form, bias)
                linear.kwargs = {}
                gm.graph.erase_node(read)
                packed += 1
        for node in placeholders(gm):
            if "amp_copy" in node.meta and not node.users:
                gm.graph.erase_node(node)
        return packed

    def _input(self, gm: GraphModule, inputs: dict[Slot, Node], copy: Node, slot: Slot) -> Node:
        if slot not in inputs:
            with gm.graph.inserting_after(placeholders(gm)[-1]):
                inputs[slot] = gm.graph.placeholder(f"{copy.name}_{slot.layout}")
            inputs[slot].meta = {**copy.meta, "amp_copy": slot, "val": copy.meta["val"].contiguous()}
            inputs[slot]._dynamo_source = None
        return inputs[slot]
