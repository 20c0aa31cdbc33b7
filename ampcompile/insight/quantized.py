"""The ops of `ampcompile.kernels.fp8` in high precision: scaled as in the mixed run, and not rounded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.fp8 import E4M3, FP8_LINEAR, QUANTIZE, QUANTIZE_WEIGHT, parts

MULTIPLY = torch.ops.aten._scaled_mm.default
OPS = (QUANTIZE, QUANTIZE_WEIGHT, FP8_LINEAR, MULTIPLY)


def compute(target: Any, args: Sequence[Any], mixed: Any, dtype: torch.dtype) -> Any:
    """Compute an op of `OPS` on operands in high precision; `mixed` is its result in the mixed run."""
    if target is QUANTIZE:
        scale = mixed[1].to(dtype)
        return args[0] / scale, scale
    if target is QUANTIZE_WEIGHT:
        weight = args[0]
        sides = [
            (side / scales.to(dtype)).flatten()
            for side, scales in zip((weight, weight.t()), _scales(mixed, weight, column=True), strict=True)
        ]
        return torch.cat([*sides, mixed[2 * weight.numel() :].to(dtype)])
    if target is MULTIPLY:
        a, b, of_a, of_b = args[:4]
        return a @ b * of_a * of_b
    _, numbers, scale, weight, buffer, transposed = args[:6]
    size = weight.numel()
    matrix = buffer[size : 2 * size].view(weight.shape[::-1]) if transposed else buffer[:size].view(weight.shape)
    return numbers @ matrix.t() * scale * _scales(buffer.to(E4M3), weight, column=False)[transposed].to(dtype)


def _scales(buffer: Tensor, weight: Tensor, column: bool) -> Sequence[Tensor]:
    """The scale of a quantized weight, twice; or those of its rows and of its columns, as a column if asked."""
    scales = parts(buffer, *weight.shape)[2]
    if not scales.dim():
        return scales, scales
    return [part[:, None] if column else part for part in scales.split(list(weight.shape))]
