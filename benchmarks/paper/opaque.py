"""Costs of our ops that are opaque to Inductor: its generated code shows only their call and operands."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from ampcompile.kernels.linear_cross_entropy import FEWEST, PIECE


class Cost(NamedTuple):
    """Costs of one call of an op."""

    launches: int
    products: int
    bytes: int
    flops: int


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """Rows, features, classes and pieces, as in the op."""
    classes = weight.shape[0]
    step = max(FEWEST, PIECE // (classes * x.itemsize) // 128 * 128)
    return x.shape[0], x.shape[1], classes, -(-x.shape[0] // step)


def _forward(x: Tensor, weight: Tensor, bias: Any, low_weight: Tensor, *_: Any) -> Cost:
    """Count forward: logits are written and read once, the weight is read for each piece."""
    rows, features, classes, pieces = _sizes(x, low_weight)
    moved = rows * features + pieces * classes * features + 2 * rows * classes
    return Cost(pieces, pieces, moved * x.itemsize, 2 * rows * features * classes)


def _backward(grad: Tensor, x: Tensor, low_weight: Tensor, *_: Any) -> Cost:
    """Count backward: logits are written, read, replaced by their gradients, and these are read twice; each piece has a
    gradient of the weight in float32, which is added to the sum of all pieces."""
    rows, features, classes, pieces = _sizes(x, low_weight)
    moved = 5 * rows * classes + 3 * rows * features + 2 * pieces * classes * features
    added = 4 * 4 * pieces * classes * features
    return Cost(2 * pieces, 3 * pieces, moved * x.itemsize + added, 6 * rows * features * classes)


_OPS = torch.ops.ampcompile
COSTS: Mapping[Any, Callable[..., Cost]] = {
    _OPS.linear_cross_entropy.default: _forward,
    _OPS.linear_cross_entropy_backward.default: _backward,
}


def cost(node: Node) -> Cost | None:
    """The cost of a call of an opaque op; None for other nodes."""
    if node.target not in COSTS:
        return None
    return COSTS[node.target](*map_arg(node.args, lambda operand: operand.meta["val"]))
