"""Fuse a linear layer with the cross entropy that alone reads it: `kernels/linear_cross_entropy.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY, PIECE
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.sizes import elements_hint
from ampcompile.passes.graph import cast_of, erase_unread, graphs, op_name
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.torch_private import tracing

from .losses import Loss, keep_rows_whole, losses, repeat_views
from .matching import Fusion, FusionCost, argument, fuse, is_low, is_view

LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class FuseLinearCrossEntropy:
    """Returns the number of layers fused with their loss. Gradients of weights are summed over pieces of the rows.

    Fusing saves memory, and costs a third of the layer's time: with `fuse="auto"` only layers whose logits are a large
    part of the device's memory are fused.
    """

    cost: FusionCost
    family = "linear_cross_entropy"
    name = "fuse_linear_cross_entropy"
    exact = False
    fate = "fused"

    def apply(self, gm: GraphModule) -> int:
        with tracing.on_fakes_of(gm):
            return sum(self._fuse(loss) for graph in graphs(gm) for loss in list(losses(graph)))

    def _fuse(self, loss: Loss) -> bool:
        linear, path = _layer(loss)
        if linear is None or not keep_rows_whole(path):
            return False
        x, weight, bias = linear.args[0], linear.args[1], argument(linear, 2, "bias")
        record = self._record(loss, linear)
        if record is None or not (is_low(x) and is_low(weight) and (bias is None or is_low(bias))):
            return False
        with loss.node.graph.inserting_before(loss.node):
            rows = repeat_views(path, x)
        (master, low), (master_bias, low_bias) = _master_and_copy(weight), _master_and_copy(bias)
        arguments = (rows, master, master_bias, low, low_bias, loss.target, loss.weight, *loss.kind)
        fuse(loss.node, LINEAR_CROSS_ENTROPY, arguments, record)
        reads = [node for node in (weight, bias) if isinstance(node, Node) and node.target is WEIGHT_COPY]
        erase_unread([*reads, linear, *path, loss.node])
        return True

    def _record(self, loss: Loss, linear: Node) -> Fusion | None:
        """The record of the fusion; None if fusing doesn't pay."""
        value = linear.meta["val"]
        sizes = [elements_hint(value), elements_hint(linear.args[1].meta["val"])]
        logits, weight = (None if size is None else size * value.itemsize for size in sizes)
        if logits is None or weight is None:
            again, freed, moved = 0, 0, None
        else:
            again, freed, moved = logits + 3 * weight * -(-logits // PIECE), max(0, logits - PIECE), 6 * logits
        if not self.cost.pays(value.device, -again, moved, freed):
            return None
        return Fusion(self.family, f"{op_name(linear.target)}, {op_name(loss.node.target)}", -again, freed)


def _layer(loss: Loss) -> tuple[Node | None, list[Node]]:
    """The linear layer of the logits, or None if it has other readers; and the views and the cast up to the loss."""
    path, node = list(loss.path), loss.logits
    while is_view(node) and len(node.users) == 1:
        path.insert(0, node)
        node = node.args[0]
    return (node if node.target is LINEAR and len(node.users) == 1 else None), path


def _master_and_copy(read: Any) -> tuple[Any, Any]:
    """The tensor that receives the gradient, and the one to multiply with."""
    if isinstance(read, Node) and read.target is WEIGHT_COPY:
        return read.args[0], read.args[1] if is_low(read.args[1]) else read
    if isinstance(read, Node) and read.target is CAST and cast_of(read):
        return read.args[0], read
    return read, read
