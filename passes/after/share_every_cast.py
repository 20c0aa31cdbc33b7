"""After differentiation: keep one cast per value and dtype, since merging casts merges no gradients any more.

Views of one value that are alike become one first, so that casts behind them are shared: layers that read the same
value each view it as a matrix, and where products run in float32 each would write it widened.
When torch splits the graph, its partitioner decides by bytes if backward reads a saved cast or repeats it.
"""

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.aliasing import returned_values
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, REARRANGES, has
from ampcompile.passes.base import EachGraph

_SHARED = CONVERSIONS_AFTER | REARRANGES


@dataclass(frozen=True)
class ShareEveryCast(EachGraph):
    """For a joint or inference graph, which writes only inputs, at its end. Returns the number of casts saved."""

    name = "share_every_cast"
    fate = "shared"

    def rewrite(self, gm: GraphModule) -> int:
        first: dict[Any, Node] = {}
        returned = returned_values(gm.graph)  # two outputs must not become one tensor
        shared = 0
        for node in list(gm.graph.nodes):
            # What binds a size or offset found at run time must stay.
            if not has(node.target, _SHARED) or node in returned or "unbacked_bindings" in node.meta:
                continue
            # A checkpointed region that backward runs again keeps casts of its own.
            key = (node.target, node.args, str(node.kwargs), node.meta.get("recompute"), node.meta.get("ac_graph_id"))
            original = first.setdefault(key, node)
            if original is not node:
                node.replace_all_uses_with(original)
                gm.graph.erase_node(node)
                shared += has(node.target, CONVERSIONS_AFTER)
        return shared
