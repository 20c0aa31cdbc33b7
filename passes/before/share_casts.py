"""Keep one cast per value and dtype where that changes no sum of gradients.

On the captured graph every use of a value has a cast of its own, so that gradients are added up in the value's type.
Two casts are merged only if no gradient flows there; after differentiation all of them are (`after/share_every_cast`).
"""

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.gradients import recorded_by_autograd
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import cast_of


@dataclass(frozen=True)
class ShareCasts(EachGraph):
    """Returns the number of casts saved. `gradients`: whether grad mode is on around the graph."""

    gradients: bool
    name = "share_casts"
    fate = "shared"

    def rewrite(self, gm: GraphModule) -> int:
        memory, recorded = Aliases(gm.graph), recorded_by_autograd(gm.graph, self.gradients)
        first: dict[Any, Node] = {}
        shared = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            source = cast.args[0]
            ours = cast_of(cast) is not None and cast not in recorded
            if ours and not any(map(memory.is_written, (source, cast))) and not memory.is_visible_outside(cast):
                original = first.setdefault((source, cast.args[1]), cast)
                if original is not cast:
                    cast.replace_all_uses_with(original)
                    gm.graph.erase_node(cast)
                    shared += 1
        return shared
