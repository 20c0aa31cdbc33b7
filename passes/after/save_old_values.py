"""After differentiation: save, never recompute, values computed from an input that the graph overwrites.

The partitioner chooses the values that backward recomputes, from saved values or from inputs, and ignores that the
forward graph writes an input at its end: backward would repeat an earlier copy with the new values. (After
`h = x.clone()` and `x.add_(1)` the gradient of `h * weight` is wrong in stock AOTAutograd.) Inductor removes copies
that change nothing. What reads such a copy later, backward or a write of another input, would then read new values
(inputs that swap their values end up equal in stock Inductor). So it reads `OLD_VALUE`, a copy that Inductor doesn't
know: to put it in, this pass runs once more behind Inductor's own, also on graphs without gradients. `OLD_VALUE` copies
what is scattered over a tensor of which it is a view, too, as in `x[1:] = x[:-1].clone()`: Inductor writes in place,
over what it reads next. Reported: https://github.com/pytorch/pytorch/issues/197829 and
https://github.com/pytorch/pytorch/issues/198131.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.passes.analysis.aliasing import base_of, overwritten_inputs
from ampcompile.passes.analysis.op_traits import SCATTERS, has
from ampcompile.passes.analysis.readers import computed_from_gradients
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import insert_call, placeholders

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define("old_value(Tensor x) -> Tensor")
_LIBRARY.impl("old_value", torch.clone, "CompositeExplicitAutograd")
OLD_VALUE = torch.ops.ampcompile.old_value.default
CLONE = torch.ops.aten.clone.default
_WRITE = torch.ops.aten.copy_.default


def _save(gm: GraphModule) -> int:
    overwritten = overwritten_inputs(gm.graph)
    backward = computed_from_gradients(gm) if overwritten else set()
    pending, saved = [_copied_for(node, gm, backward) for node in placeholders(gm) if node in overwritten], 0
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


def _copy_overlaps(gm: GraphModule) -> int:
    """Copy the operands that are views of what a scatter writes to."""
    copied = 0
    for node in list(gm.graph.nodes):
        if has(node.target, SCATTERS):
            written = base_of(node.args[0])
            for operand in node.all_input_nodes:
                if operand is not node.args[0] and base_of(operand) is written:
                    node.replace_input_with(operand, _copy(operand, gm, before=node))
                    copied += 1
    return copied


def _copy(value: Node, gm: GraphModule, before: Node) -> Node:
    with gm.graph.inserting_before(before):
        return insert_call(gm.graph, OLD_VALUE, value)


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
    copy = _copy(value, gm, before=placeholders(gm)[-1].next)
    copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    value.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and not _writes(user, value))
    return copy


def _writes(node: Node, value: Node) -> bool:
    return node.target is _WRITE and node.args[0] is value


def _is_view(node: Node) -> bool:
    return base_of(node) is not node


@dataclass(frozen=True)
class SaveOldValues(EachGraph):
    """For a joint or inference graph. Returns the number of values that are saved if backward needs them, or copied."""

    name = "save_old_values"

    def rewrite(self, gm: GraphModule) -> int:
        return _save(gm) + _copy_overlaps(gm)
