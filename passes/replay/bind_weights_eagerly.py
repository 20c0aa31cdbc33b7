"""For graphs that torch's own autograd differentiates as they run: make reads of copies differentiable twice."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from ampcompile.passes.base import EachGraph
from ampcompile.passes.weight_copy import WEIGHT_COPY, read_copy


@dataclass(frozen=True)
class BindWeightsEagerly(EachGraph):
    """Also turns nested compile regions into plain calls: their op differentiates itself on fake tensors only.

    Returns the number of reads bound.
    """

    name = "bind_weights_eagerly"

    def rewrite(self, gm: GraphModule) -> int:
        reads = gm.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
        for node in reads:
            node.target = read_copy
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
            body, _, *operands = node.args
            node.op, node.target, node.args = "call_module", body.target, tuple(operands)
        return len(reads)
