"""After differentiation: keep one cast per value and dtype, since merging casts merges no gradients any more.

Views of one value that are alike become one first, so that casts behind them are shared: layers that read the same
value each view it as a matrix, and where products run in float32 each would write it widened.
When torch splits the graph, its partitioner decides by bytes if backward reads a saved cast or repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.aliasing import returned_values
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, REARRANGES, has
from ampcompile.passes.graph import graphs


@dataclass(frozen=True)
class ShareEveryCast:
    """For a joint or inference graph, which writes only inputs, at its end. Returns the number of casts saved."""

    name = "share_casts"
    exact = True
    fate = "shared"

    def apply(self, gm: GraphModule) -> int:
        return sum(map(_share, graphs(gm)))


def _share(gm: GraphModule) -> int:
    first: dict[Any, Node] = {}
    returned = returned_values(gm.graph)  # two outputs must not become one tensor
    shared = 0
    for cast in list(gm.graph.nodes):
        if not has(cast.target, CONVERSIONS_AFTER | REARRANGES) or cast in returned:
            continue
        # A checkpointed region that backward runs again keeps casts of its own.
        key = (cast.target, cast.args, str(cast.kwargs), cast.meta.get("recompute"), cast.meta.get("ac_graph_id"))
        original = first.setdefault(key, cast)
        if original is not cast:
            cast.replace_all_uses_with(original)
            gm.graph.erase_node(cast)
            shared += has(cast.target, CONVERSIONS_AFTER)
    return shared
