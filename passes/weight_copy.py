"""The op that stands for a weight's cast until differentiation: it reads the weight's copy, an input of the graph."""

from typing import Any

import torch


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
