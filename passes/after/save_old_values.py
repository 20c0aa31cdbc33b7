"""After differentiation: save, never recompute, values computed from an input that the graph overwrites.

The partitioner chooses the values that backward recomputes, from saved values or from inputs, and ignores that the
forward graph writes an input at its end: backward would repeat an earlier copy with the new values. (After
`h = x.clone()` and `x.add_(1)` the gradient of `h * weight` is wrong in stock AOTAutograd.) Inductor removes copies
that change nothing before it partitions, and backward would read the input itself: where it does, it gets a new copy.
So for Inductor this pass runs once more after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.passes.analysis.aliasing import base_of, overwritten_inputs
from ampcompile.passes.analysis.gradients import computed_from_gradients
from ampcompile.passes.graph import graphs, placeholders
from ampcompile.torch_private import tracing

_WRITE = torch.ops.aten.copy_.default
_CLONE = torch.ops.aten.clone.default


def _save(gm: GraphModule) -> int:
    overwritten = overwritten_inputs(gm.graph)
    backward = computed_from_gradients(gm) if overwritten else set()
    pending, saved = [_copied_for(node, gm, backward) for node in overwritten], 0
    while pending:
        for user in pending.pop().users:
            if user.op != "call_function" or user.target is _WRITE:
                continue
            if _is_view(user):
                pending.append(user)
            else:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                saved += 1
    return saved


def _copied_for(value: Node, gm: GraphModule, backward: set[Node]) -> Node:
    """A copy for all that read an input, if backward is among them, or a write of another input; else the input."""
    pending = [value]
    while pending:
        users = [user for user in pending.pop().users if not _writes(user, value)]
        if any(user in backward or user.target is _WRITE for user in users):
            break
        pending += filter(_is_view, users)
    else:
        return value
    with gm.graph.inserting_after(placeholders(gm)[-1]), tracing.on_fakes_of(gm), torch.no_grad():
        copy = gm.graph.call_function(_CLONE, (value,))
        copy.meta = {"val": value.meta["val"].clone(), "recompute": CheckpointPolicy.MUST_SAVE}
    value.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and not _writes(user, value))
    return copy


def _writes(node: Node, value: Node) -> bool:
    return node.target is _WRITE and node.args[0] is value


def _is_view(node: Node) -> bool:
    return base_of(node) is not node


@dataclass(frozen=True)
class SaveOldValues:
    """For a joint graph. Returns the number of values that are saved if backward needs them, never recomputed."""

    name = "save_old_values"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        return sum(map(_save, graphs(gm)))
