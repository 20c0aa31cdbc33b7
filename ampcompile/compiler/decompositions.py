"""Decompositions for Inductor, where its own are slow or inexact on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.attention_backward import FLASH_BACKWARD, attention_backward
from ampcompile.torch_private import lowering

ATEN = torch.ops.aten
EMBEDDING_BACKWARD = ATEN.embedding_dense_backward.default
NORMS = (
    ATEN.native_layer_norm.default,
    ATEN.native_group_norm.default,
    ATEN.native_batch_norm.default,
    ATEN._native_batch_norm_legit.default,
    ATEN._native_batch_norm_legit.no_stats,
    ATEN._native_batch_norm_legit_functional.default,
    ATEN._batch_norm_with_update.default,
    ATEN._batch_norm_with_update_functional.default,
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions with ours added."""
    table = lowering.inductors_decompositions(kept=[EMBEDDING_BACKWARD])
    embedding_backward = table[EMBEDDING_BACKWARD]

    def embedding_dense_backward(grad: Tensor, *args: Any) -> Any:
        """Keep eager's kernel on the CPU, which adds whole rows; Inductor's loop adds each number atomically."""
        return NotImplemented if grad.device.type == "cpu" else embedding_backward(grad, *args)

    table[EMBEDDING_BACKWARD] = embedding_dense_backward
    table |= {norm: _with_exact_statistics(table[norm]) for norm in NORMS if norm in table}
    table[FLASH_BACKWARD] = attention_backward
    table[ATEN.expm1.default] = _expm1
    table |= dict.fromkeys((ATEN.remainder.Tensor, ATEN.remainder.Scalar, ATEN.remainder.Scalar_Tensor), _remainder)
    return table


def _expm1(x: Tensor) -> Any:
    """Keep the digits of small numbers on the CPU, where Inductor's vectors compute exp(x) - 1."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return NotImplemented
    wide = x.float() if x.itemsize == 2 else x
    half = (wide / 2).tanh()
    return torch.where(wide < 1, 2 * half / (1 - half), wide.exp() - 1).to(x.dtype)


def _remainder(x: Any, y: Any) -> Any:
    """Compute exact remainders of large numbers on the CPU, where Inductor's vectors subtract a rounded product."""
    tensors = [each for each in (x, y) if isinstance(each, Tensor)]
    if any(each.device.type != "cpu" or not each.is_floating_point() for each in tensors):
        return NotImplemented
    dtype = torch.result_type(x, y)
    x, y = (each.float() if isinstance(each, Tensor) and each.itemsize == 2 else each for each in (x, y))
    rest = torch.fmod(x if isinstance(x, Tensor) else torch.full_like(y, x), y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest).to(dtype)


def _with_exact_statistics(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a norm's statistics in float32 for the backward, as eager's kernels do: with a 16-bit input and float32
    weights Inductor rounds mean and deviation on the CPU, and gradients are then a fifth further from float64."""

    def norm(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if x.device.type != "cpu" or x.itemsize != 2 or all(t.dtype != torch.float32 for t in tensors):
            return decompose(x, *args, **kwargs)
        out, *others = decompose(x.float(), *args, **kwargs)
        return out.to(x.dtype), *others

    return norm
