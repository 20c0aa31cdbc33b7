"""For a graph that runs again under torch's own autograd: reads of weight copies become the casts they stand for.

Copies have no history: with them a gradient of a gradient would miss what the weights contribute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from .graph import bodies
from .weight_copy import WEIGHT_COPY

CAST = torch.ops.aten.to.dtype


@dataclass(frozen=True)
class UnbindWeights:
    """Returns the number of reads. The copies stay inputs, which nothing reads.

    Nested compile regions become plain calls: their op differentiates itself on fake tensors only.
    """

    name = "unbind_weights"
    exact = True

    def apply(self, gm: GraphModule) -> int:
        graph = gm.graph
        reads = graph.find_nodes(op="call_function", target=WEIGHT_COPY)
        for read in reads:
            weight, copy = read.args
            read.target, read.args = CAST, (weight, copy.meta["val"].dtype)
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
            body, _, *operands = node.args
            node.op, node.target, node.args = "call_module", body.target, tuple(operands)
        inner = sum(self.apply(body) for _, body in bodies(gm))
        gm.recompile()
        return len(reads) + inner
