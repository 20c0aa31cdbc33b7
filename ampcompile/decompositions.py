"""What Inductor takes apart while it differentiates, where its own choice is slow on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import compat
from .config import Options
from .kernels.attention_backward import FLASH_BACKWARD, attention_backward

EMBEDDING_BACKWARD = torch.ops.aten.embedding_dense_backward.default


def decompositions(options: Options) -> dict[Any, Callable[..., Any]]:
    """Inductor's table with ours in it. In relaxed mode every number is Inductor's own, so attention stays."""
    table = compat.inductors_decompositions(kept=[EMBEDDING_BACKWARD])
    embedding_backward = table[EMBEDDING_BACKWARD]

    def embedding_dense_backward(grad: Tensor, *args: Any) -> Any:
        """On the CPU eager's kernel, which adds whole rows; Inductor's loop adds each number atomically."""
        return NotImplemented if grad.device.type == "cpu" else embedding_backward(grad, *args)

    table[EMBEDDING_BACKWARD] = embedding_dense_backward
    if options.numerics == "eager":
        table[FLASH_BACKWARD] = attention_backward
    return table
