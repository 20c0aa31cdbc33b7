"""An op of a mixed graph once more in high precision, and how far the mixed result is from it."""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from ampcompile.passes.analysis.op_traits import (
    COPIES_AFTER,
    arguments_by_name,
    draws_random_numbers,
    has,
    is_view,
    name_of,
    reads_bits,
)
from ampcompile.passes.graph import copy_graph
from ampcompile.records.graphs import Numbers
from ampcompile.torch_private import pytree
from ampcompile.torch_private.dispatcher import HigherOrderOperator, OpOverload, without_out_dtype

aten = torch.ops.aten
_ATTENTION = "aten::_scaled_dot_product_"
_FLOAT32 = torch.finfo(torch.float32)
_SMALLEST = _FLOAT32.smallest_normal * _FLOAT32.eps
REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)  # raised by kernels for unsupported dtypes
_SCALED_PRODUCT = aten._scaled_mm.default
_SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


def to_high_precision(value: Any, dtype: torch.dtype) -> Any:
    """Convert every floating and complex tensor in a structure to high precision."""

    def raise_tensor(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, raise_tensor, value)


def compute_in_high_precision(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], mixed: Any, dtype: torch.dtype
) -> Any:
    """Compute a node on operands in high precision, laid out as `mixed`, its result in the mixed run.

    None if no kernel can. An op that doesn't support `dtype` runs in float32.
    """
    for attempt in dict.fromkeys((dtype, torch.float32)):
        try:
            high_args, high_kwargs = to_high_precision(_retype((args, kwargs), attempt), attempt)
            result = _call(node.target, high_args, high_kwargs, mixed, attempt)
        except torch.OutOfMemoryError:
            raise
        except REFUSED:
            continue
        return None if result is None else _lay_out_as(to_high_precision(result, dtype), mixed)
    return None


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mixed: Any, dtype: torch.dtype) -> Any:
    if target is aten.native_dropout.default:
        scale = 1 / (1 - args[1]) if args[2] is not False and args[1] < 1 else 1.0
        return args[0] * mixed[1] * scale, mixed[1]
    if is_attention(target):
        return attention(target, args, kwargs, to_high_precision(mixed, dtype))
    if draws_random_numbers(target) or reads_bits(target):
        return None
    if (fp8 := sys.modules.get("ampcompile.kernels.fp8")) is not None and target in (*fp8.OPS, _SCALED_PRODUCT):
        return _quantized(fp8, target, args, mixed, dtype)
    if target in _SOFTMAX:
        return target(args[0], args[1], False)  # its flag converts a 16-bit operand to float32
    target, args = without_out_dtype(target, args)
    return target(*args, **kwargs)


def _quantized(fp8: Any, target: Any, args: Sequence[Any], mixed: Any, dtype: torch.dtype) -> Any:
    """An op of 8-bit products, scaled as in the mixed run, and not rounded; `fp8`: the module that defines it."""
    if target is fp8.QUANTIZE:
        scale = mixed[1].to(dtype)
        return args[0] / scale, scale
    if target is fp8.QUANTIZE_WEIGHT:
        weight = args[0]
        scales = (scale[:, None] if scale.dim() else scale for scale in _scales(fp8, mixed, weight))
        sides = ((side / own.to(dtype)).flatten() for side, own in zip((weight, weight.t()), scales, strict=True))
        return torch.cat([*sides, mixed[2 * weight.numel() :].to(dtype)])
    if target is _SCALED_PRODUCT:
        a, b, of_a, of_b = args[:4]
        return a @ b * of_a * of_b
    _, numbers, scale, weight, buffer, transposed = args[:6]
    size = weight.numel()
    matrix = buffer[size : 2 * size].view(weight.shape[::-1]) if transposed else buffer[:size].view(weight.shape)
    return numbers @ matrix.t() * scale * _scales(fp8, buffer.to(fp8.E4M3), weight)[transposed].to(dtype)


def _scales(fp8: Any, buffer: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """The scale of a quantized weight, twice; or those of its rows and of its columns."""
    scales: Tensor = fp8.parts(buffer, *weight.shape)[2]
    return scales.split(list(weight.shape)) if scales.dim() else (scales, scales)


def compared(node: Node, value: Any) -> list[Tensor]:
    """Return the floating tensors of a result; those of 8 bits in float32, and a quantized weight once."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if is_floating(leaf)]
    if str(node.target) == "ampcompile.quantize_weight.default":
        leaves = [leaf[: node.args[0].meta["val"].numel()] for leaf in leaves]
    return [leaf.float() if leaf.itemsize == 1 else leaf for leaf in leaves]


def _retype(arguments: Any, dtype: torch.dtype) -> Any:
    """Arguments with every floating dtype replaced; bodies of higher-order ops likewise, each as a copy."""

    def retype(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return dtype if leaf.is_floating_point else dtype.to_complex() if leaf.is_complex else leaf
        return _body(leaf, dtype) if isinstance(leaf, GraphModule) else leaf

    return pytree.tree_map(retype, arguments)


def _body(body: GraphModule, dtype: torch.dtype) -> GraphModule:
    copy = copy_graph(body)
    for node in copy.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda value: _retype(value, dtype))
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


def computes_floats(node: Node, result: Any) -> bool:
    """Return True if an op computes floating values: no view, no copy, no choice, no constant number."""
    target = node.target
    if not isinstance(target, OpOverload | HigherOrderOperator):
        return False
    if is_view(target) or has(target, COPIES_AFTER) or target is aten.scalar_tensor.default:
        return False
    return any(is_floating(value) for value in pytree.tree_leaves(result))


def is_floating(value: Any) -> bool:
    """Return True if a value is a tensor of floating or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_attention(target: Any) -> bool:
    """Return True if an op is one of torch's fused attentions, or the backward of one."""
    return isinstance(target, OpOverload) and name_of(target).startswith(_ATTENTION)


def attention(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mixed: Any) -> tuple[Any, ...] | None:
    """Compute `op` by plain ops, in the operands' own precision; results beside attention itself are those of `mixed`.

    Accelerators' fused kernels take 16-bit types only. None with dropout: only the fused kernel knows its mask.
    """
    arguments = arguments_by_name(op, args, kwargs)
    if arguments.get("dropout_p"):
        return None
    bias = next((arguments[name] for name in ("attn_bias", "attn_mask") if arguments.get(name) is not None), None)
    operands = [arguments["query"], arguments["key"], arguments["value"], *([bias] if bias is not None else [])]
    gradient = next((arguments[name] for name in ("grad_out", "grad_out_") if name in arguments), None)
    operands = [operand.detach().requires_grad_(gradient is not None) for operand in operands]
    with torch.enable_grad():
        result, _ = aten._scaled_dot_product_attention_math(
            *operands, is_causal=arguments.get("is_causal", False), scale=arguments.get("scale"), enable_gqa=True
        )
    if gradient is None:
        return (result, *mixed[1:])
    gradients = torch.autograd.grad(result, operands, gradient)
    return (*gradients[: len(mixed)], *mixed[len(gradients) :])


def measure(mixed: Sequence[Tensor], local: Sequence[Tensor] | None, exact: Sequence[Tensor] | None) -> Numbers:
    """Measure one op's results; `local` and `exact` are in high precision."""
    elements = sum(value.numel() for value in mixed)
    alone = [*zip(mixed, local, strict=True)] if local is not None else []
    other = exact if exact is not None else local

    def share(masks: Iterable[Tensor]) -> float:
        return sum(int(mask.sum()) for mask in masks) / max(elements, 1)

    return Numbers(
        local=_worst(map(relative_error, mixed, local)) if local is not None else None,
        cumulative=_worst(map(relative_error, mixed, exact)) if exact is not None else None,
        largest=_worst(_largest(value) for value in mixed),
        overflowed=share(~m.isfinite() & _finite_in_float32(e) for m, e in alone),
        flushed=share((m == 0) & (e.abs() >= _SMALLEST) for m, e in alone),
        elements=elements,
        not_finite=share(map(find_not_finite, mixed, other or mixed)),
    )


def combine(parts: Sequence[Numbers]) -> Numbers:
    """Combine several measurements into one: the worst errors, shares of all elements."""
    elements = sum(part.elements for part in parts)
    shares = {
        name: sum(getattr(part, name) * part.elements for part in parts) / max(elements, 1)
        for name in ("overflowed", "flushed", "not_finite")
    }
    local, cumulative = (
        [error for part in parts if (error := getattr(part, name)) is not None] for name in ("local", "cumulative")
    )
    return Numbers(
        local=_worst(local) if local else None,
        cumulative=_worst(cumulative) if cumulative else None,
        largest=_worst(part.largest for part in parts),
        elements=elements,
        ops=sum(part.ops for part in parts),
        **shares,
    )


def find_not_finite(mixed: Tensor, exact: Tensor) -> Tensor:
    """Return a mask of the elements that are NaN in either run, or infinite in one alone."""
    same_sign = torch.ones_like(mixed, dtype=torch.bool) if mixed.is_complex() else mixed.sign() == exact.sign()
    agreeing = mixed.isinf() & (exact.abs() > _FLOAT32.max) & same_sign
    return ~(mixed.isfinite() & exact.isfinite()) & ~agreeing


def squares(mixed: Tensor, exact: Tensor) -> tuple[float, float]:
    """Squared L2 distance, and squared norm of `exact`, over the elements that are finite in float32.

    NaN if there are none; infinite distance if `mixed` isn't finite at one of them, or is finite where `exact` isn't.
    """
    comparable = _finite_in_float32(exact)
    lost = bool((mixed.isfinite() & ~exact.isfinite()).any())
    if comparable.numel() and not lost and not comparable.any():
        return math.nan, math.nan
    exact = torch.where(comparable, exact, 0)
    difference = torch.where(comparable, mixed.to(exact.dtype), 0) - exact
    distance = float(torch.linalg.vector_norm(difference).double())
    distance = math.inf if lost else distance
    return (distance**2 if math.isfinite(distance) else math.inf), float(torch.linalg.vector_norm(exact).double()) ** 2


def relative_error(mixed: Tensor, exact: Tensor) -> float:
    """L2 distance over the norm of `exact`; infinite or NaN as the distance of `squares`."""
    return ratio(*squares(mixed, exact))


def ratio(distance: float, norm: float) -> float:
    """Relative error from squared distance and squared norm."""
    if distance == 0 or math.isnan(distance):
        return distance
    return math.sqrt(distance / norm) if norm > 0 and math.isfinite(distance) else math.inf


def _finite_in_float32(exact: Tensor) -> Tensor:
    return exact.abs() <= _FLOAT32.max


def _largest(value: Tensor) -> float:
    magnitudes = value.abs()[value.isfinite()]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def _worst(values: Iterable[float]) -> float:
    """Return the largest value; NaN only if all are."""
    numbers = list(values)
    return max((value for value in numbers if not math.isnan(value)), default=math.nan if numbers else 0.0)
