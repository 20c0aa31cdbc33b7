"""After differentiation: replace every `weight_copy(weight, copy)` by `copy` itself."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.aliasing import base_of
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import insert_call, note, replace_node
from ampcompile.passes.weight_copy import WEIGHT_COPY


@dataclass(frozen=True)
class BindWeights(EachGraph):
    """For a joint or inference graph; clones a copy that the graph returns. Returns the number of reads bound."""

    name = "bind_weights"

    def rewrite(self, gm: GraphModule) -> int:
        graph, reads = gm.graph, gm.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
        copies: set[Node] = set()
        for node in reads:
            copy, dtype = node.args[1:]
            copies.add(copy)
            read = copy
            if copy.meta["val"].dtype != dtype:  # held as float32, for products that run in float32
                note(copy, rounded=dtype)
                with graph.inserting_before(node):
                    read = insert_call(graph, CONVERT, copy, dtype, like=node)
                note(read, widened=True)
            replace_node(node, read)
        output = graph.output_node()
        with graph.inserting_before(output):
            for value in set(output.all_input_nodes):
                if base_of(value) in copies:
                    output.replace_input_with(value, insert_call(graph, torch.ops.aten.clone.default, value))
        return len(reads)
