"""Ops of a mixed graph in high precision: their operands, and every floating dtype in their arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.op_traits import COPIES_AFTER, draws_random_numbers, has, is_view, reads_bits
from ampcompile.passes.analysis.schema import arguments_by_name
from ampcompile.passes.graph import copy_graph, op_name
from ampcompile.torch_private import joint_graphs, pytree
from ampcompile.torch_private.types import HigherOrderOperator, OpOverload

from .attention import attention, is_attention

aten = torch.ops.aten
REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)  # raised by kernels for unsupported dtypes
_OUT_DTYPE = {aten.mm.dtype: aten.mm.default, aten.addmm.dtype: aten.addmm.default, aten.bmm.dtype: aten.bmm.default}
_SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


def to_high_precision(value: Any, dtype: torch.dtype) -> Any:
    """Convert every floating and complex tensor in a structure to high precision."""

    def raise_tensor(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, raise_tensor, value)


def compute_in_high_precision(
    node: Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mixed: Any,
    dtype: torch.dtype,
    differentiable: bool = False,
) -> Any:
    """Compute a node on operands in high precision, laid out as `mixed`, its result in the mixed run.

    None if no kernel can. An op that doesn't support `dtype` runs in float32. `differentiable`: norms and
    backwards run as simpler ops, since torch differentiates neither the statistics of norms nor all backwards.
    """
    for attempt in dict.fromkeys((dtype, torch.float32)):
        try:
            high_args, high_kwargs = to_high_precision(_retype((args, kwargs), attempt), attempt)
            result = _call(node, high_args, high_kwargs, mixed, attempt, differentiable)
        except torch.OutOfMemoryError:
            raise
        except REFUSED:
            continue
        return None if result is None else _lay_out_as(to_high_precision(result, dtype), mixed)
    return None


def _call(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], mixed: Any, dtype: torch.dtype, differentiable: bool
) -> Any:
    target: Any = node.target
    if target is aten.native_dropout.default:
        scale = 1 / (1 - args[1]) if args[2] is not False and args[1] < 1 else 1.0
        return args[0] * mixed[1] * scale, mixed[1]
    if is_attention(target):
        return attention(target, args, kwargs, to_high_precision(mixed, dtype))
    if draws_random_numbers(target) or reads_bits(target):
        return None
    if target in _OUT_DTYPE:
        arguments = arguments_by_name(target, args, kwargs)
        return _OUT_DTYPE[target](**{name: value for name, value in arguments.items() if name != "out_dtype"})
    if target in _SOFTMAX:
        return target(args[0], args[1], False)  # its flag converts a 16-bit operand to float32
    if differentiable and target is aten.detach.default:
        return args[0].view_as(args[0])  # errors don't stop there
    if differentiable and target is aten.copy.default:
        return args[1].expand_as(args[0])
    if differentiable and target is aten.threshold_backward.default:
        return _backward_of_kink(args[0], args[1], args[2], mixed.dtype)
    if differentiable and re.search("norm|_backward$", op_name(target)):
        return joint_graphs.decomposition(target)(*args, **kwargs)
    return target(*args, **kwargs)


def _backward_of_kink(gradient: Tensor, operand: Tensor, threshold: float, dtype: torch.dtype) -> Tensor:
    """Compute the gradient of a ReLU, differentiable as if the operand were known up to a rounding alone.

    What a rounding does there isn't its size times a derivative: it sends an operand to the other side of the kink,
    or not. The derivative given to each is the root of that probability, over the size of such a rounding.
    """
    rounding = torch.finfo(dtype if dtype in LOW else torch.bfloat16).eps / 2
    size = rounding * operand.detach().square().mean().sqrt() + torch.finfo(operand.dtype).tiny
    crosses = torch.special.erfc((operand.detach() - threshold).abs() / size / 2**0.5) / 2
    slope = gradient.detach() * crosses.sqrt() / size
    return gradient * (operand > threshold) + (operand - operand.detach()) * slope


def _retype(arguments: Any, dtype: torch.dtype) -> Any:
    """Arguments with every floating dtype replaced; bodies of higher-order ops likewise, each as a copy."""

    def retype(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return dtype if leaf.is_floating_point else dtype.to_complex() if leaf.is_complex else leaf
        return _body(leaf, dtype) if isinstance(leaf, GraphModule) else leaf

    return pytree.tree_map(retype, arguments)


def _body(body: GraphModule, dtype: torch.dtype) -> GraphModule:
    copy = copy_graph(body)
    replace: Callable[[Any], Any] = lambda value: _retype(value, dtype)  # noqa: E731
    for node in copy.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), replace)
        elif node.op == "get_attr":
            setattr(copy, str(node.target), to_high_precision(_retype(getattr(body, str(node.target)), dtype), dtype))
    copy.recompile()
    return copy


def _lay_out_as(result: Any, mixed: Any) -> Any:
    """Return a result with the strides of another; None if the shapes differ."""
    values, spec = pytree.tree_flatten(result)
    others = pytree.tree_leaves(mixed)
    if len(values) != len(others):
        return None
    for index, (value, other) in enumerate(zip(values, others, strict=True)):
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            values[index] = other
        elif value.shape != other.shape:
            return None
        elif value.stride() != other.stride() and value.numel() and all(other.stride()):
            values[index] = torch.empty_strided(
                other.shape, other.stride(), dtype=value.dtype, device=value.device
            ).copy_(value)
    return pytree.tree_unflatten(values, spec)


def rounds(node: Node, result: Any) -> bool:
    """Return True if an op computes floating values: no view, no copy, no choice among values."""
    target = node.target
    if not isinstance(target, OpOverload | HigherOrderOperator):
        return False
    if is_view(target) or has(target, COPIES_AFTER):
        return False
    return any(is_floating(value) for value in pytree.tree_leaves(result))


def is_floating(value: Any) -> bool:
    """Return True if a value is a tensor of floating or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
