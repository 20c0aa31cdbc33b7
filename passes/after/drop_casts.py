"""After differentiation: drop casts that change nothing, torch's own and those of gradients included.

torch's decompositions (of resizing images, for one) widen a value, rearrange it and narrow it again; this pass
rearranges the narrow value itself. Sums of gradients are explicit here, so ops that repeat numbers may stand between
the casts too.
"""

import operator
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node, map_arg

from ampcompile.dtypes import is_lossless
from ampcompile.passes.analysis.aliasing import base_of, overwritten_inputs, returned_values
from ampcompile.passes.analysis.commuting import (
    cast_dtypes,
    classify_movement,
    constants_survive,
    look_through,
    rebuild,
)
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has, is_view
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import erase_unread, replace_node
from ampcompile.torch_private import dispatcher


def _drop(graph: Graph, second: Node, written: set[Node]) -> bool:
    """Drop a cast and the lossless cast that it undoes, if only ops that commute with casts stand between them.

    Keep both if they cast an input that the graph overwrites: backward may read it afterwards.
    """

    def moves(node: Node) -> bool:
        return bool(classify_movement(node)) and (len(node.users) == 1 or is_view(node.target))

    first, path = look_through(second.args[0], moves)
    if not isinstance(first, Node) or cast_dtypes(first) is None:
        return False
    source = first.args[0]
    a, b, c = (node.meta["val"].dtype for node in (source, first, second))
    exact = a == c and is_lossless(a, b) and all(constants_survive(node, a) for node in path)
    if not exact or base_of(source) in written:
        return False
    with graph.inserting_before(second):
        second.replace_all_uses_with(rebuild(path, source))
    erase_unread([first, *path, second])
    return True


def _correct_fakes(node: Node) -> int:
    """Correct the dtype that a fake kernel claims, and drop the casts that would then be copies."""
    dropped = 0
    args = map_arg(node.args, lambda operand: operand.meta["val"])
    value = node.meta["val"] = dispatcher.as_computed(node.target, args, node.meta["val"])
    for result in [user for user in node.users if user.target is operator.getitem]:
        result.meta["val"] = value[result.args[1]]
        casts = [user for user in result.users if has(user.target, CONVERSIONS_AFTER)]
        for cast in [cast for cast in casts if cast.meta["val"].dtype == result.meta["val"].dtype]:
            replace_node(cast, result)
            dropped += 1
    return dropped


@dataclass(frozen=True)
class DropCasts(EachGraph):
    """For a joint or inference graph, which writes only inputs, at its end. Returns the number of casts dropped."""

    name = "drop_casts"
    fate = "folded"

    def rewrite(self, gm: GraphModule) -> int:
        graph, dropped = gm.graph, 0
        for node in list(graph.nodes):
            if node.target in dispatcher.FAKES_OF_WRONG_DTYPE:
                dropped += _correct_fakes(node)
        returned = returned_values(graph)  # two outputs must not become one tensor
        written = overwritten_inputs(graph)
        for cast in list(graph.nodes):
            if cast_dtypes(cast) and cast not in returned:
                dropped += _drop(graph, cast, written)
        return dropped
