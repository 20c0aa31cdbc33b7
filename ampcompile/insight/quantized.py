"""The ops of `ampcompile.kernels.fp8` in high precision: scaled as in the mixed run, and not rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.fp8 import E4M3, FP8_LINEAR, QUANTIZE, QUANTIZE_WEIGHT, TAIL, parts

MULTIPLY = torch.ops.aten._scaled_mm.default
OPS = (QUANTIZE, QUANTIZE_WEIGHT, FP8_LINEAR, MULTIPLY)


def compute(target: Any, args: Sequence[Any], mixed: Any, dtype: torch.dtype) -> Any:
    """Compute an op of `OPS` on operands in high precision; `mixed` is its result in the mixed run."""
    if target is QUANTIZE:
        scale = mixed[1].to(dtype)
        return args[0] / scale, scale
    if target is QUANTIZE_WEIGHT:
        weight = args[0] / parts(mixed, *args[0].shape)[2].to(dtype)
        return torch.cat([weight.flatten(), weight.t().flatten(), mixed[-TAIL:].to(dtype)])
    if target is MULTIPLY:
        a, b, of_a, of_b = args[:4]
        return a @ b * of_a * of_b
    _, numbers, scale, weight, buffer, turned = args
    plain = buffer[: weight.numel()].view(weight.shape)
    of_weight = parts(buffer.to(E4M3), *weight.shape)[2].to(dtype)
    return numbers @ (plain if turned else plain.t()) * scale * of_weight


def matrix_of(buffer: Tensor) -> Tensor:
    """The numbers of a quantized weight, once."""
    return buffer[: (buffer.numel() - TAIL) // 2]
