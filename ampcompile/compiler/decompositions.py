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
    return table


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
