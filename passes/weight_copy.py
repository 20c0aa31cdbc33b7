"""The copy of a weight as a graph input, and the placeholder op for the weight's cast until differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ampcompile.kernels.packed_conv import Blocks


@dataclass(frozen=True)
class Slot:
    """A weight's copy that a graph reads as an input: the index of the weight among the inputs, dtype and layout."""

    weight: int
    dtype: torch.dtype
    blocks: Blocks | None = None
    """The blocks it is packed in; None: strided as the weight."""
    wide: bool = False
    """True if the copy holds its numbers, rounded to `dtype`, as float32."""
    on_trial: bool = False
    """True if the tensor is neither a parameter nor a registered buffer: its copy is kept only after the tensor has
    stayed the same for some calls."""
    gathered: bool = False
    """True if the copy isn't kept: FSDP gathers the weight for each call, and its low-precision numbers with it."""


@torch.library.custom_op("ampcompile::weight_copy", mutates_args=())
def weight_copy(weight: torch.Tensor, copy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` in `dtype`, read from its up-to-date `copy`; gradients flow to `weight`, in its dtype.

    The op never runs: a `torch.library` op may not return its input. `bind_weights` replaces it on the joint graph,
    and a graph that torch's own autograd differentiates uses `read_copy`.
    """
    raise AssertionError("weight_copy must be bound before it runs")


@weight_copy.register_fake
def _(weight: torch.Tensor, copy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(copy, dtype=dtype)


def _remember_dtype(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return grad.to(ctx.dtype), None, None


weight_copy.register_autograd(_backward, setup_context=_remember_dtype)
WEIGHT_COPY = torch.ops.ampcompile.weight_copy.default


class _ReadCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return copy.detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def read_copy(weight: torch.Tensor, copy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight_copy` for a graph that torch's own autograd differentiates as it runs; differentiable twice."""
    return _ReadCopy.apply(weight, copy, dtype)
