"""After differentiation: save, never recompute, values computed from an input that the graph overwrites.

The partitioner chooses the values that backward recomputes, from saved values or from inputs, and ignores that the
forward graph writes an input at its end: backward would repeat an earlier copy with the new values. (After
`h = x.clone()` and `x.add_(1)` the gradient of `h * weight` is wrong in stock AOTAutograd.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.passes.analysis.aliasing import base_of, overwritten_inputs
from ampcompile.passes.graph import graphs

_WRITE = torch.ops.aten.copy_.default


def _save(gm: GraphModule) -> int:
    pending, saved = list(overwritten_inputs(gm.graph)), 0
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
