"""How graphs spell a norm: torch's three ops, and the RMS norm that most language models write by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ampcompile.passes.analysis.commuting import CAST
from ampcompile.torch_private.types import OpOverload

from .matching import argument, is_low, is_upcast

ATEN = torch.ops.aten
LAYER_NORM = ATEN.layer_norm.default
GROUP_NORM = ATEN.group_norm.default
RMS_NORM = ATEN.rms_norm.default if hasattr(ATEN, "rms_norm") else None
_SUMS = (ATEN.add.Tensor, ATEN.add.Scalar)
_ROUNDINGS = (CAST, ATEN.type_as.default)


@dataclass(frozen=True)
class Norm:
    """A norm of a graph; `node` is its result."""

    node: Node
    operand: Node
    """What is normed: float32, or 16 bits that the norm itself widens."""
    weight: Node | None
    bias: Node | None
    width: int
    """How many numbers a row has; of a group norm, how many channels a group has."""
    eps: float
    centered: bool
    inner: bool = False
    """Whether the normed value is rounded to the operand's type: before it is multiplied by the weight, or before
    SiLU."""
    inside: tuple[Node, ...] = ()
    """The nodes between operand and result, which nothing else reads."""
    groups: int = 0
    """Of channels, if it is a group norm."""
    silu: bool = False
    """Whether SiLU of the norm is the result."""

    @property
    def what(self) -> OpOverload:
        """The op that it is, or its last by hand."""
        return GROUP_NORM if self.groups else self.node.target


def norms(graph: Graph) -> Iterator[Norm]:
    """All norms of a graph, in order."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (LAYER_NORM, RMS_NORM):
            found = _match_op(node)
        elif _calls(node, GROUP_NORM):
            found = _match_group_norm(node)
        else:
            found = _match_by_hand(node) if _calls(node, ATEN.rsqrt.default) else None
        if found is not None:
            yield found


def _match_op(node: Node) -> Norm | None:
    centered = node.target is LAYER_NORM
    shape, weight = node.args[1], argument(node, 2, "weight")
    bias, eps = (
        (argument(node, 3, "bias"), argument(node, 4, "eps", 1e-5)) if centered else (None, argument(node, 3, "eps"))
    )
    operand = node.args[0]
    if eps is None and operand.meta["val"].dtype is torch.float32:
        eps = torch.finfo(torch.float32).eps
    if eps is None or not all(isinstance(size, int) for size in shape):
        return None
    return Norm(node, operand, weight, bias, math.prod(shape), eps, centered)


def _match_group_norm(node: Node) -> Norm | None:
    """A group norm, and SiLU if that alone reads it."""
    operand, groups = node.args[:2]
    weight, bias, eps = argument(node, 2, "weight"), argument(node, 3, "bias"), argument(node, 4, "eps", 1e-5)
    shape = operand.meta["val"].shape
    channels = shape[1]
    if not isinstance(channels, int) or any(isinstance(size, int) and size == 0 for size in shape):
        return None
    norm = Norm(node, operand, weight, bias, channels // groups, eps, True, groups=groups)
    if len(node.users) != 1 or not _calls(silu := next(iter(node.users)), ATEN.silu.default):
        return norm
    return replace(norm, node=silu, inner=is_low(node), inside=(node,), silu=True)


def _match_by_hand(rsqrt: Node) -> Norm | None:
    """`x * rsqrt(mean(x²) + eps)`, then `* weight`, perhaps with a cast of the user's to the type of x between."""
    inside: list[Node] = [rsqrt]
    total = _take_sole(rsqrt.args[0], inside, *_SUMS)
    mean = _take_sole(_operand(total, 0), inside, ATEN.mean.dim)
    square = _take_sole(_operand(mean, 0), inside, ATEN.pow.Tensor_Scalar, ATEN.square.default, ATEN.mul.Tensor)
    if total is None or mean is None or square is None or len(rsqrt.users) != 1:
        return None
    (product,) = rsqrt.users
    eps = argument(total, 1, "other")
    x, other = _before_widening(square.args[0]), argument(square, 1, "exponent")
    same = other == 2 if square.target is ATEN.pow.Tensor_Scalar else other is None or _before_widening(other) is x
    if not same or not isinstance(eps, float) or total.kwargs or not _calls(product, ATEN.mul.Tensor):
        return None
    value, shape = x.meta["val"], product.meta["val"].shape
    last = isinstance(mean.args[1], list) and mean.args[1] in ([-1], [value.dim() - 1]) and argument(mean, 2, "keepdim")
    factors = [node for node in product.args if node is not rsqrt]
    in_float32 = all(n.meta["val"].dtype is torch.float32 for n in (square, mean, total, rsqrt, product))
    if not last or not in_float32 or len(factors) != 1 or _before_widening(factors[0]) is not x:
        return None
    if not isinstance(shape[-1], int) or list(map(str, shape)) != list(map(str, value.shape)):
        return None
    widened = [n for read in (square.args[0], other, factors[0]) for n in _widening_casts(read)]
    closed = {*inside, product, *widened}
    inside += [node for node in dict.fromkeys(widened) if closed.issuperset(node.users)]
    if any(is_upcast(node) and node not in inside for node in widened):
        return None  # float32 is read elsewhere: the gradients of both meet there
    return _add_weight(Norm(product, x, None, None, shape[-1], eps, False, inside=tuple(inside)))


def _add_weight(norm: Norm) -> Norm:
    """The same with the weight, if one follows."""
    node, inside, inner = norm.node, [*norm.inside, norm.node], False
    if len(node.users) == 1 and _calls(cast := next(iter(node.users)), *_ROUNDINGS):
        of_x = norm.operand.meta["val"].dtype
        inner = is_low(cast) and cast.meta["val"].dtype is of_x
        if inner or cast.meta["val"].dtype is node.meta["val"].dtype:
            node = cast
            inside.append(cast)
    if len(node.users) != 1 or not _calls(product := next(iter(node.users)), ATEN.mul.Tensor):
        return norm
    weights = [factor for factor in product.args if factor is not node]
    if len(weights) != 1 or not isinstance(weights[0], Node) or not _is_vector(weights[0], norm.width):
        return norm
    return Norm(product, norm.operand, weights[0], None, norm.width, norm.eps, False, inner, tuple(inside))


def _is_vector(node: Node, width: int) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 1 and str(value.shape[0]) == str(width)


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _take_sole(node: Any, inside: list[Node], *targets: Any) -> Node | None:
    """A node that calls one of `targets` for one reader; noted in `inside`."""
    if not _calls(node, *targets) or len(node.users) != 1:
        return None
    inside.append(node)
    return node


def _operand(node: Node | None, index: int) -> Any:
    return None if node is None else node.args[index]


def _widening_casts(node: Any) -> list[Node]:
    """The casts that end in a node and change no number: to float32, or to the type there is."""
    found = []
    while _calls(node, CAST) and (is_upcast(node) or node.meta["val"].dtype is node.args[0].meta["val"].dtype):
        found.append(node)
        node = node.args[0]
    return found


def _before_widening(node: Any) -> Any:
    casts = _widening_casts(node)
    return casts[-1].args[0] if casts else node
