"""Find cross entropies that read 16-bit logits through a cast, and the nodes between logits and loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.op_traits import DROPS, KEEPS_ORDER, has
from ampcompile.passes.graph import call_on_values

from .matching import argument, is_low, is_view

LOSS = torch.ops.aten.cross_entropy_loss.default
_REDUCTIONS = ("none", "mean", "sum")
_RESHAPE = torch.ops.aten.reshape.default
_RESHAPED = (_RESHAPE, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class Loss(NamedTuple):
    """One loss: the 16-bit logits, the nodes between them and the loss, the other arguments as kernels take them."""

    node: Node
    logits: Node
    path: list[Node]
    target: Node
    weight: Node | None
    kind: tuple[Any, ...]
    """`reduction`, `ignore_index`, `label_smoothing`."""


def losses(gm: GraphModule) -> Iterator[Loss]:
    """Yield losses of (rows, classes) logits and class indices, where nothing else reads the logits in float32."""
    memory = Aliases(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=LOSS):
        source = find_16_bit_source(node.args[0])
        target, weight = node.args[1], argument(node, 2, "weight")
        if source is None or memory.is_written(source[0]) or not _fits(node.args[0], target, weight):
            continue
        reduction = _REDUCTIONS[argument(node, 3, "reduction", 1)]
        rest = argument(node, 4, "ignore_index", -100), argument(node, 5, "label_smoothing", 0.0)
        yield Loss(node, *source, target, weight, (reduction, *rest))


def find_16_bit_source(value: Any) -> tuple[Node, list[Node]] | None:
    """The 16-bit source of a float32 value, and the nodes between them in order: one cast, and views.

    None if there is none, or if one of the nodes has another user, so that float32 is needed anyway.
    """
    path: list[Node] = []
    while isinstance(value, Node) and len(value.users) == 1 and (is_upcast(value) or is_view(value)):
        path.insert(0, value)
        if is_upcast(value):
            return value.args[0], path
        value = value.args[0]
    return None


def is_upcast(node: Any) -> bool:
    """True if a node only widens a 16-bit value to float32: our cast, or the user's."""
    if not isinstance(node, Node) or node.target is not CAST:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    same_place = before.layout is after.layout and before.device == after.device
    return before.dtype in LOW and after.dtype is torch.float32 and same_place


def _fits(logits: Node, target: Any, weight: Any) -> bool:
    value, wanted = logits.meta["val"], target.meta["val"]
    of_indices = wanted.dtype is torch.int64 and wanted.dim() == 1
    fixed = isinstance(value.shape[-1], int) and value.shape[-1] > 0
    return value.dim() == 2 and of_indices and fixed and (weight is None or weight.meta["val"].dtype is torch.float32)


def repeat_views(path: Sequence[Node], operand: Node) -> Node:
    """Apply the views of `path` in order to a value of another width, without the casts. A view may have to copy.
    All views must keep the last dimension as it is (`keep_rows_whole`)."""
    width = operand.meta["val"].shape[-1]
    for node in path:
        if is_upcast(node):
            continue
        copy = node.graph.node_copy(node)
        rest = list(node.args[1:])
        if node.target in _RESHAPED:
            copy.target = _RESHAPE
            rest[0] = [*rest[0][:-1], width]
        copy.args = (operand, *rest)
        copy.meta = {**node.meta, "val": call_on_values(copy)}
        operand = copy
    assert is_low(operand)
    return operand


def keep_rows_whole(path: Sequence[Node]) -> bool:
    """True if views only choose and regroup whole rows of the last dimension, as `repeat_views` requires."""
    return all(is_upcast(node) or _keeps_rows_whole(node) for node in path)


def _keeps_rows_whole(node: Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.shape[-1] is not after.shape[-1] and str(before.shape[-1]) != str(after.shape[-1]):
        return False
    if has(node.target, DROPS):
        dim = argument(node, 1, "dim", 0)
        return dim % before.dim() != before.dim() - 1
    return has(node.target, KEEPS_ORDER)
