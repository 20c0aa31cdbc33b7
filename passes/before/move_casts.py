"""Cast fewer bytes: move casts up before ops that repeat or pad numbers, and down behind ops that drop some.

Only if every result keeps its bits and its layout (or only elementwise ops read it, whose results are the same in
any layout), and if gradients are added up as before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import (
    CAST,
    classify_movement,
    constants_survive,
    move_cast,
    rebuild,
    same_layout,
)
from ampcompile.passes.analysis.gradients import recorded_by_autograd
from ampcompile.passes.analysis.op_traits import is_elementwise
from ampcompile.passes.analysis.sizes import is_smaller
from ampcompile.passes.graph import cast_of, graphs
from ampcompile.torch_private import tracing


@dataclass(frozen=True)
class MoveCasts:
    """Returns the number of casts moved. `gradients`: whether grad mode is on around the graph."""

    gradients: bool
    name = "move_casts"
    exact = True
    fate = "moved"

    def apply(self, gm: GraphModule) -> int:
        with tracing.on_fakes_of(gm), torch.no_grad():
            return sum(map(self._move, graphs(gm)))

    def _move(self, gm: GraphModule) -> int:
        memory, recorded = Aliases(gm.graph), recorded_by_autograd(gm.graph, self.gradients)
        moved = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            if cast_of(cast):
                moved += _move_up(gm.graph, cast, memory, recorded) or _move_down(gm.graph, cast, memory, recorded)
        return moved


def _move_up(graph: Graph, cast: Node, memory: Aliases, recorded: set[Node]) -> bool:
    """Move a cast before the ops in front of it, if fewer numbers are cast there."""
    path: list[Node] = []
    best: list[Node] = []
    node, least = cast.args[0], cast
    while isinstance(node, Node) and _may_pass(node, cast, recorded):
        if len(node.users) > 1 and (cast in recorded or not node.target.is_view):
            break
        path.insert(0, node)
        node = node.args[0]
        if isinstance(node, Node) and is_smaller(node.meta["val"], least.meta["val"]):
            best, least = list(path), node
    if not best or any(map(memory.is_written, (least, *best, cast))) or memory.is_visible_outside(cast):
        return False
    with graph.inserting_before(cast):
        last = rebuild(best, move_cast(cast, least))
    return _put_in_place(graph, cast, last, [cast, *reversed(best)])


def _move_down(graph: Graph, cast: Node, memory: Aliases, recorded: set[Node]) -> bool:
    """Move a cast behind the ops after it, if fewer numbers are cast there."""
    path: list[Node] = []
    best: list[Node] = []
    node = least = cast
    while len(node.users) == 1 and _may_pass(user := next(iter(node.users)), cast, recorded):
        path.append(user)
        node = user
        if is_smaller(node.meta["val"], least.meta["val"]):
            best, least = list(path), node
    source = cast.args[0]
    assert isinstance(source, Node)
    if not best or memory.is_written(source) or memory.is_written(cast) or memory.is_visible_outside(cast):
        return False
    with graph.inserting_before(least):
        last = move_cast(cast, rebuild(best, source))
    return _put_in_place(graph, least, last, [*reversed(best), cast])


def _may_pass(node: Node, cast: Node, recorded: set[Node]) -> bool:
    kind = classify_movement(node)
    if kind not in ("moves", "repeats") or (kind == "repeats" and cast in recorded):
        return False
    before, after = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype
    return constants_survive(node, before) and constants_survive(node, after)


def _put_in_place(graph: Graph, old: Node, new: Node, unused: list[Node]) -> bool:
    """Let the readers of `old` read `new`, and erase unread nodes; undo all if the readers depend on `old`'s layout."""
    fits = same_layout(old.meta["val"], new.meta["val"]) or all(is_elementwise(user.target) for user in old.users)
    if fits:
        old.replace_all_uses_with(new)
    else:
        unused = [new]
        while (
            len(unused[-1].args)
            and isinstance(above := unused[-1].args[0], Node)
            and not above.users.keys() - {unused[-1]}
        ):
            unused.append(above)
    for node in unused:
        if not node.users:
            graph.erase_node(node)
    return fits
