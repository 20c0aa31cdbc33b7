"""After differentiation: one tensor in the place of the copies that a fused op makes for its readers.

Before, each reader had a copy of its own, so that their gradients were added up in float32.
"""

from __future__ import annotations

from torch.fx import Graph

from ampcompile.kernels.norm import COPIED
from ampcompile.passes.graph import bodies


def merge_copies(graph: Graph) -> int:
    """For a joint or inference graph, whose ops write nothing but inputs, at its end. Returns the copies merged."""
    returned = set(graph.output_node().all_input_nodes)  # what is returned twice is two tensors
    merged = 0
    for copy in graph.find_nodes(op="call_function", target=COPIED):
        if copy not in returned:
            copy.replace_all_uses_with(copy.args[0])
            graph.erase_node(copy)
            merged += 1
    return merged + sum(merge_copies(body.graph) for _, body in bodies(graph.owning_module))
