"""One cast per value and dtype, where that changes no sum of gradients.

On the captured graph every use of a value has a cast of its own, so that gradients are added up in the value's type.
Two casts may be one there only if no gradient flows; after differentiation (`share_after_differentiation`) all of
them may. Which of them backward then keeps or computes again is decided by bytes, when torch splits the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.analysis.aliasing import Memory, returned
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.gradients import differentiable
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has
from ampcompile.passes.graph import bodies


@dataclass(frozen=True)
class ShareCasts:
    """`gradients`: whether grad mode is on around the graph. Returns how many casts were saved."""

    gradients: bool
    name = "share_casts"
    exact = True

    def apply(self, gm: GraphModule) -> int:
        return self._share(gm, set())

    def _share(self, gm: GraphModule, done: set[int]) -> int:
        if id(gm) in done:
            return 0
        done.add(id(gm))
        memory, recorded = Memory(gm.graph), differentiable(gm.graph, self.gradients)
        first: dict[Any, Node] = {}
        shared = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            source = cast.args[0]
            ours = "amp_cast" in cast.meta and cast not in recorded
            if ours and not any(map(memory.is_written, (source, cast))) and not memory.is_seen(cast):
                shared += _merge(gm.graph, cast, first.setdefault((source, cast.args[1]), cast))
        return shared + sum(self._share(body, done) for _, body in bodies(gm))


def share_after_differentiation(graph: Graph) -> int:
    """The same for a joint or inference graph, whose ops write nothing but inputs, at its end."""
    first: dict[Any, Node] = {}
    apart = returned(graph)
    shared = 0
    for cast in list(graph.nodes):
        if not has(cast.target, CONVERSIONS_AFTER) or cast in apart:  # what is returned twice is two tensors
            continue
        # A checkpointed stretch that backward runs again keeps casts of its own.
        key = (cast.target, cast.args, str(cast.kwargs), cast.meta.get("recompute"), cast.meta.get("ac_graph_id"))
        shared += _merge(graph, cast, first.setdefault(key, cast))
    return shared + sum(share_after_differentiation(body.graph) for _, body in bodies(graph.owning_module))


def _merge(graph: Graph, cast: Node, kept: Node) -> bool:
    if cast is kept:
        return False
    cast.replace_all_uses_with(kept)
    graph.erase_node(cast)
    return True
