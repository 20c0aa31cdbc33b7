"""Keep one cast per value and dtype where that changes no sum of gradients: before differentiation, and after it.

On the captured graph every use of a value has a cast of its own, so that gradients are added up in the value's type:
two casts are merged only if no gradient flows there. After differentiation merging casts merges no gradients any more.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from .analysis.aliasing import Aliases, returned_values
from .analysis.commuting import CAST
from .analysis.op_traits import CONVERSIONS, CONVERSIONS_AFTER, REARRANGES, has
from .analysis.readers import recorded_by_autograd
from .base import EachGraph
from .graph import cast_of, replace_node

_SHARED_AFTER = CONVERSIONS_AFTER | REARRANGES


def _share(nodes: Iterable[Node]) -> int:
    """Replace each node by the first that is equal to it; return the number of casts saved."""
    first: dict[Any, Node] = {}
    shared = 0
    for node in nodes:
        # A checkpointed region that backward runs again keeps casts of its own.
        key = (node.target, node.args, str(node.kwargs), node.meta.get("recompute"), node.meta.get("ac_graph_id"))
        original = first.setdefault(key, node)
        if original is not node:
            replace_node(node, original)
            shared += has(node.target, CONVERSIONS)
    return shared


@dataclass(frozen=True)
class ShareCasts(EachGraph):
    """For a captured graph. Returns the number of casts saved. `gradients`: whether grad mode is on around it."""

    gradients: bool
    name = "share_casts"
    fate = "shared"

    def rewrite(self, gm: GraphModule) -> int:
        memory, recorded = Aliases(gm.graph), recorded_by_autograd(gm.graph, self.gradients)
        casts = gm.graph.find_nodes(op="call_function", target=CAST)
        ours = [cast for cast in casts if cast_of(cast) is not None and cast not in recorded]
        alone = [cast for cast in ours if not any(map(memory.is_written, (cast.args[0], cast)))]
        return _share([cast for cast in alone if not memory.is_visible_outside(cast)])


@dataclass(frozen=True)
class ShareEveryCast(EachGraph):
    """For a joint or inference graph, which writes only inputs, at its end. Returns the number of casts saved.

    Views of one value that are alike become one first, so that casts behind them are shared: layers that read the same
    value each view it as a matrix, and where products run in float32 each would write it widened.
    When torch splits the graph, its partitioner decides by bytes if backward reads a saved cast or repeats it.
    """

    name = "share_every_cast"
    fate = "shared"

    def rewrite(self, gm: GraphModule) -> int:
        returned = returned_values(gm.graph)  # two outputs must not become one tensor
        nodes = [node for node in gm.graph.nodes if has(node.target, _SHARED_AFTER) and node not in returned]
        return _share([node for node in nodes if "unbacked_bindings" not in node.meta])  # a size found at run time
