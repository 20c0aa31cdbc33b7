"""Fuse a linear layer with the cross entropy that alone reads it: `kernels/linear_cross_entropy.py`.

Between the two stand the cast of 16-bit logits to float32, ours or the user's, and views that leave rows whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY, PIECE
from ampcompile.kernels.usable import memory_of, usable
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST, classify_movement, look_through
from ampcompile.passes.analysis.op_traits import DROPS, FUSED_THROUGH, KEEPS_ORDER, has
from ampcompile.passes.analysis.sizes import elements_hint
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import Fusion, call_on_values, cast_of, erase_unread, note, op_name
from ampcompile.passes.weight_copy import WEIGHT_COPY

aten = torch.ops.aten
LOSS = aten.cross_entropy_loss.default
_REDUCTIONS = ("none", "mean", "sum")
_RESHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class FuseLinearCrossEntropy(EachGraph):
    """Returns the number of layers fused with their loss. Gradients of weights are summed over pieces of the rows.

    Fusing saves memory, and costs a third of the layer's time. If `sparingly`, as with `fuse="auto"`, only layers are
    fused whose logits are a tenth of a GPU's memory or more; else wherever they match.
    """

    sparingly: bool
    name = "fuse_linear_cross_entropy"
    exact = False
    fate = "fused"

    def rewrite(self, gm: GraphModule) -> int:
        memory = Aliases(gm.graph)
        return sum(self._fuse(loss, memory) for loss in gm.graph.find_nodes(op="call_function", target=LOSS))

    def _fuse(self, loss: Node, memory: Aliases) -> bool:
        linear, path = find_layer(loss.args[0])
        if linear is None or memory.is_written(linear) or not _fits(loss) or not keep_rows_whole(path):
            return False
        x, weight, bias = linear.args[0], linear.args[1], _argument(linear, 2, "bias")
        record = self._record(loss, linear)
        if record is None or not (_is_low(x) and _is_low(weight) and (bias is None or _is_low(bias))):
            return False
        with loss.graph.inserting_before(loss):
            rows = repeat_views(path, x)
        (master, low), (master_bias, low_bias) = _master_and_copy(weight), _master_and_copy(bias)
        operands = rows, master, master_bias, low, low_bias, loss.args[1], _argument(loss, 2, "weight")
        reduction = _REDUCTIONS[_argument(loss, 3, "reduction", 1)]
        rest = _argument(loss, 4, "ignore_index", -100), _argument(loss, 5, "label_smoothing", 0.0)
        _replace(loss, (*operands, reduction, *rest), record)
        reads = [node for node in (weight, bias) if isinstance(node, Node) and node.target is WEIGHT_COPY]
        erase_unread([*reads, linear, *path, loss])
        return True

    def _record(self, loss: Node, linear: Node) -> Fusion | None:
        """The record of the fusion; None if fusing doesn't pay."""
        value = linear.meta["val"]
        sizes = [elements_hint(value), elements_hint(linear.args[1].meta["val"])]
        logits, weight = (None if size is None else size * value.itemsize for size in sizes)
        again = freed = 0
        if logits is not None and weight is not None:
            again, freed = logits + 3 * weight * -(-logits // PIECE), max(0, logits - PIECE)
        if value.device.type == "cuda" and not usable():
            return None
        if self.sparingly and not 10 * freed >= memory_of(value.device) > 0:
            return None
        return Fusion("linear_cross_entropy", f"{op_name(linear.target)}, {op_name(loss.target)}", -again, freed)


def find_layer(value: Any) -> tuple[Node | None, list[Node]]:
    """The linear layer of float32 logits, and the nodes from it up to them, in order: one cast, and views.

    The layer is None if there is none, or if one of the nodes has another user, so that the logits are needed anyway.
    """

    def goes_on(node: Node) -> bool:
        return len(node.users) == 1 and (_is_upcast(node) or _is_movement(node))

    layer, path = look_through(value, goes_on)
    alone = isinstance(layer, Node) and len(layer.users) == 1 and layer.target is aten.linear.default
    return (layer if alone and any(map(_is_upcast, path)) else None), path


def _is_upcast(node: Node) -> bool:
    """True if a node only widens a 16-bit value to float32: our cast, or the user's."""
    if node.target is not CAST:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    same_place = before.layout is after.layout and before.device == after.device
    return before.dtype in LOW and after.dtype is torch.float32 and same_place


def _fits(loss: Node) -> bool:
    """True for logits (rows, classes) and class indices."""
    value, wanted, weight = loss.args[0].meta["val"], loss.args[1].meta["val"], _argument(loss, 2, "weight")
    of_indices = wanted.dtype is torch.int64 and wanted.dim() == 1
    fixed = isinstance(value.shape[-1], int) and value.shape[-1] > 0
    return value.dim() == 2 and of_indices and fixed and (weight is None or weight.meta["val"].dtype is torch.float32)


def keep_rows_whole(path: Sequence[Node]) -> bool:
    """True if views only choose and regroup whole rows of the last dimension, as `repeat_views` requires."""
    return all(_is_upcast(node) or _keeps_rows_whole(node) for node in path)


def _keeps_rows_whole(node: Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.shape[-1] is not after.shape[-1] and str(before.shape[-1]) != str(after.shape[-1]):
        return False
    if has(node.target, DROPS):
        dim = _argument(node, 1, "dim", 0)
        return dim % before.dim() != before.dim() - 1
    return has(node.target, KEEPS_ORDER)


def repeat_views(path: Sequence[Node], operand: Node) -> Node:
    """Apply the views of `path` in order to a 16-bit value of another width, without the cast. A view may have to copy.
    All views must keep the last dimension as it is (`keep_rows_whole`)."""
    width = operand.meta["val"].shape[-1]
    for node in path:
        if _is_upcast(node):
            continue
        copy = node.graph.node_copy(node)
        rest = list(node.args[1:])
        if node.target in _RESHAPED:
            copy.target = aten.reshape.default
            rest[0] = [*rest[0][:-1], width]
        copy.args = (operand, *rest)
        copy.meta = {**node.meta, "val": call_on_values(copy)}
        operand = copy
    return operand


def _master_and_copy(read: Any) -> tuple[Any, Any]:
    """The tensor that receives the gradient, and the one to multiply with."""
    if isinstance(read, Node) and read.target is WEIGHT_COPY:
        return read.args[0], read.args[1] if _is_low(read.args[1]) else read
    if isinstance(read, Node) and read.target is CAST and cast_of(read):
        return read.args[0], read
    return read, read


def _argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _is_low(node: Any) -> bool:
    """True if a node is a dense 16-bit floating tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in LOW and value.layout is torch.strided


def _is_movement(node: Any) -> bool:
    """True if a node returns its first operand's numbers, or some of them, each once, in other places."""
    return isinstance(node, Node) and classify_movement(node) == "moves" and has(node.target, FUSED_THROUGH)


def _replace(loss: Node, args: Sequence[Any], record: Fusion) -> None:
    """Replace a loss by the fused op's. Nodes without readers stay until `erase_unread`."""
    graph = loss.graph
    meta = {key: value for key, value in loss.meta.items() if key not in ("val", "tensor_meta")}
    with graph.inserting_before(loss):
        fused = graph.call_function(LINEAR_CROSS_ENTROPY, tuple(args))
        fused.meta = {**meta, "val": call_on_values(fused)}
        note(fused, fusion=record)
        result = graph.call_function(operator.getitem, (fused, 0))
        result.meta = {**meta, "val": fused.meta["val"][0]}
    loss.replace_all_uses_with(result)
