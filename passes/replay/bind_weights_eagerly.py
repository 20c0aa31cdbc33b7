"""For graphs that torch's own autograd differentiates as they run: make reads of copies differentiable twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from ampcompile.passes.graph import graphs
from ampcompile.passes.weight_copy import WEIGHT_COPY, read_copy


def _bind(gm: GraphModule) -> int:
    reads = gm.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
    for node in reads:
        node.target = read_copy
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        body, _, *operands = node.args
        node.op, node.target, node.args = "call_module", body.target, tuple(operands)
    return len(reads)


@dataclass(frozen=True)
class BindWeightsEagerly:
    """Also turns nested compile regions into plain calls: their op differentiates itself on fake tensors only.

    Returns the number of reads bound.
    """

    name = "bind_weights_eagerly"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        return sum(map(_bind, graphs(gm)))
