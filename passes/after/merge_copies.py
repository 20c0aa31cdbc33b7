"""After differentiation: one tensor in the place of the copies that a fused op makes for its readers.

Before, each reader had a copy of its own, so that their gradients were added up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from ampcompile.kernels.norm import COPIED
from ampcompile.passes.graph import graphs


def _merge(gm: GraphModule) -> int:
    returned = set(gm.graph.output_node().all_input_nodes)  # two outputs must not become one tensor
    merged = 0
    for copy in gm.graph.find_nodes(op="call_function", target=COPIED):
        if copy not in returned:
            copy.replace_all_uses_with(copy.args[0])
            gm.graph.erase_node(copy)
            merged += 1
    return merged


@dataclass(frozen=True)
class MergeCopies:
    """For a joint or inference graph, whose ops write nothing but inputs, at its end. Returns the copies merged."""

    name = "merge_copies"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        return sum(map(_merge, graphs(gm)))
