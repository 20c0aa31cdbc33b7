"""Fused attention in float64: accelerators' fused kernels take 16-bit types only, so it is computed by plain ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampcompile.passes.analysis.schema import arguments_by_name, name_of
from ampcompile.torch_private.types import OpOverload

_PREFIX = "aten::_scaled_dot_product_"


def is_attention(target: Any) -> bool:
    """Return True if an op is one of torch's fused attentions, or the backward of one."""
    return isinstance(target, OpOverload) and name_of(target).startswith(_PREFIX)


def attention(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mixed: Any) -> tuple[Any, ...] | None:
    """Compute `op` on these operands, in their own precision; results beside attention itself are those of `mixed`.

    None with dropout: only the fused kernel knows its mask. Differentiable where gradients are enabled.
    """
    arguments = arguments_by_name(op, args, kwargs)
    if arguments.get("dropout_p"):
        return None
    bias = next((arguments[name] for name in ("attn_bias", "attn_mask") if arguments.get(name) is not None), None)
    operands = [arguments["query"], arguments["key"], arguments["value"], *([bias] if bias is not None else [])]
    gradient = next((arguments[name] for name in ("grad_out", "grad_out_") if name in arguments), None)
    if gradient is None:
        return (_compute_attention(arguments, *operands), *mixed[1:])
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        inner = [operand if operand.requires_grad else operand.detach().requires_grad_() for operand in operands]
        result = _compute_attention(arguments, *inner)
        gradients = torch.autograd.grad(result, inner, gradient, create_graph=twice)
    return (*gradients[: len(mixed)], *mixed[len(gradients) :])


def _compute_attention(
    arguments: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> Tensor:
    if key.shape[-3] != query.shape[-3]:  # groups of heads share keys and values
        key, value = (v.repeat_interleave(query.shape[-3] // v.shape[-3], -3) for v in (key, value))
    scale = arguments.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if arguments.get("is_causal"):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value
