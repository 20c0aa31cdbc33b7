"""Remove the first of two consecutive casts if it changes nothing: A→B→C equals A→C if B holds every value of A.

Ops that only move numbers may stand between the two; they then run on A. Such pairs occur where a user's `.float()`
is followed by an op in low precision. The user's cast stays if other nodes read it. With `relaxed`, a first cast of
ours that rounds is removed as well.
"""

from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from ampcompile.dtypes import is_lossless
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import (
    CAST,
    cast_dtypes,
    classify_movement,
    constants_survive,
    is_cast,
    rebuild,
)
from ampcompile.passes.analysis.readers import recorded_by_autograd
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import cast_of, erase_unread


@dataclass(frozen=True)
class FoldCasts(EachGraph):
    """Returns the number of pairs folded. `gradients`: whether grad mode is on around the graph."""

    gradients: bool
    relaxed: bool = False
    name = "fold_casts"
    fate = "folded"

    @property
    def exact(self) -> bool:
        return not self.relaxed

    def rewrite(self, gm: GraphModule) -> int:
        memory, folded = Aliases(gm.graph), 0
        recorded = recorded_by_autograd(gm.graph, self.gradients)
        for second in gm.graph.find_nodes(op="call_function", target=CAST):
            if cast_of(second):
                folded += self._fold_one(gm.graph, second, memory, recorded)
        return folded

    def _fold_one(self, graph: Graph, second: Node, memory: Aliases, recorded: set[Node]) -> bool:
        first, path = _find_first_cast(second, second in recorded)
        if first is None or not self._may_fold(first, second, path, second in recorded):
            return False
        source = first.args[0]
        assert isinstance(source, Node)
        cancels = source.meta["val"].dtype == second.meta["val"].dtype
        written = any(map(memory.is_written, _values_between(source, second)))
        if written or (cancels and (memory.is_written(second) or memory.is_visible_outside(second))):
            return False
        with graph.inserting_before(second):
            if cancels:
                second.replace_all_uses_with(rebuild(path, source))
            else:
                second.update_arg(0, rebuild(path, source))
        erase_unread([*([first] if cast_of(first) else []), *path, *([second] if cancels else [])])
        return True

    def _may_fold(self, first: Node, second: Node, path: list[Node], recorded: bool) -> bool:
        a, b, c = (node.meta["val"].dtype for node in (first.args[0], first, second))
        if path and not (a.is_floating_point and all(constants_survive(node, a) for node in path)):
            return False
        # The gradient is cast C→B→A, which must equal C→A.
        exact = is_lossless(a, b) and (is_lossless(c, b) or not recorded)
        return exact or (self.relaxed and cast_of(first) is not None)


def _find_first_cast(second: Node, recorded: bool) -> tuple[Node | None, list[Node]]:
    """The cast that `second` reads, if only ops that commute with it stand between them, and those ops in order."""
    path: list[Node] = []
    node = second.args[0]
    while isinstance(node, Node):
        # The gradients of a value that is used twice or repeated are summed in that value's type.
        if recorded and (len(node.users) > 1 or classify_movement(node) == "repeats"):
            break
        if is_cast(node):
            return node, path
        if classify_movement(node):
            path.insert(0, node)
        elif cast_dtypes(node) is None:  # one to the dtype that its operand has already is passed over
            break
        node = node.args[0]
    return None, []


def _values_between(source: Node, second: Node) -> list[Node]:
    """The values from the operand of `second` back to `source`, both included."""
    values = [second.args[0]]
    while values[-1] is not source:
        values.append(values[-1].args[0])
    return values
