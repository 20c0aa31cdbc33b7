"""After differentiation: every `weight_copy(weight, copy)` becomes `copy` itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.graph import bodies
from ampcompile.passes.weight_copy import WEIGHT_COPY, read_copy
from ampcompile.torch_private.types import OpOverload


def _may_be(node: Node, copies: set[Node]) -> bool:
    """Whether a value is a copy, or a view of one."""
    while node not in copies:
        if not (isinstance(node.target, OpOverload) and node.target.is_view and isinstance(node.args[0], Node)):
            return False
        node = node.args[0]
    return True


def bind(graph: Graph) -> int:
    """Replace every `weight_copy` of a joint or inference graph, bodies included; a returned copy is cloned first."""
    bound = sum(bind(body.graph) for _, body in bodies(graph.owning_module))
    copies: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=WEIGHT_COPY):
        copy = node.args[1]
        copies.add(copy)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        bound += 1
    output = graph.output_node()
    with graph.inserting_before(output):
        for returned in set(output.all_input_nodes):
            if copies and _may_be(returned, copies):
                clone = graph.call_function(torch.ops.aten.clone.default, (returned,))
                clone.meta = dict(returned.meta)
                output.replace_input_with(returned, clone)
    return bound


@dataclass(frozen=True)
class BindWeights:
    """For a graph after differentiation. Returns the number of reads bound."""

    name = "bind_weights"
    exact = True

    def apply(self, gm: GraphModule) -> int:
        return bind(gm.graph)


@dataclass(frozen=True)
class BindWeightsEagerly:
    """For a graph that torch's own autograd will differentiate as it runs. Returns the number of reads bound.

    Nested compile regions become plain calls: their op differentiates itself on fake tensors only.
    """

    name = "bind_weights_eagerly"
    exact = True

    def apply(self, gm: GraphModule) -> int:
        reads = gm.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
        for node in reads:
            node.target = read_copy
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
            body, _, *operands = node.args
            node.op, node.target, node.args = "call_module", body.target, tuple(operands)
        inner = sum(self.apply(body) for _, body in bodies(gm))
        gm.recompile()
        return len(reads) + inner
