"""Group norm in one pass over memory: residual added before, SiLU and rounding behind, float32 in registers.

With N numbers: 12·N flops forward, 25·N backward. Bytes: forward reads x and the residual from memory once, a second
time from the cache, and writes the sum and each result once, 2 or 4 bytes a number as their types are; backward reads
the sum and every gradient as often and writes one. Kept for backward: the sum (or x), in its own type, and 8 bytes a
group.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private.dispatcher import triton_op

from .norm import copied, differentiated, norm_backward_reference, norm_reference, on_gpu, remember
from .usable import on_device_of


@triton_op("ampcompile::group_norm")
def group_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    inner: bool,
    wide: bool,
    low: torch.dtype,
    lows: int,
) -> list[Tensor]:
    """`silu(group_norm(x + residual) * weight + bias)`, SiLU if asked for, over `groups` groups of channels.

    `x`, `residual`: float32, float16 or bfloat16, of one shape (samples, channels, ...), no channel empty. `weight`,
    `bias`: a number of any of these types a channel. `inner`: what SiLU gets is rounded to the type of the sum.
    Returns, in this order: mean of each group and its reciprocal deviation, float32 (samples·groups); the sum, if there
    is a `residual`, in the type that torch's addition gives; the result in float32, if `wide`; the result in `low`,
    `lows` times, each for one reader: their gradients are added up in float32.
    """
    if on_gpu(x):
        from .triton import group_norm as gpu

        added, scale, shift = map(_contiguous, (residual, weight, bias))
        narrow = low if lows else None
        with on_device_of(x):
            found = gpu.forward(x.contiguous(), added, scale, shift, groups, eps, silu, inner, wide, narrow)
    else:
        found = group_norm_reference(x, residual, weight, bias, groups, eps, silu, inner, wide, low if lows else None)
    results = [each for each in found if each is not None]
    return [*results, *(copied(results[-1]) for _ in range(lows - 1))]


def group_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    inner: bool,
    wide: bool,
    low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same in plain torch: mean, reciprocal deviation, sum, wide and low result, those asked for."""
    h = x if residual is None else x + residual
    rows = _rows(h, groups)
    mean, rstd, _, value, _ = norm_reference(rows, None, None, None, rows.shape[1], eps, True, False, True, None)
    assert mean is not None and value is not None
    out = _scaled(value.view(h.shape), weight, bias, h.dtype if inner else None)
    out = torch.nn.functional.silu(out) if silu else out
    return mean, rstd, None if residual is None else h, out if wide else None, None if low is None else out.to(low)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _rows(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0] * groups, math.prod(x.shape[1:]) // groups)


def _by_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.float().view(-1, *[1] * (like.dim() - 2))


def _scaled(value: Tensor, weight: Tensor | None, bias: Tensor | None, rounded: torch.dtype | None) -> Tensor:
    value = value if weight is None else value * _by_channel(weight, value)
    value = value if bias is None else value + _by_channel(bias, value)
    return value if rounded is None else value.to(rounded).float()


@triton_op("ampcompile::group_norm_backward")
def group_norm_backward(
    grads: Sequence[Tensor],
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    inner: bool,
    to_weight: bool,
    to_bias: bool,
    second: torch.dtype | None,
) -> list[Tensor]:
    """The gradient of `h`, what was normed, in its type and in `second`, if given; those of weight and bias, float32.

    `grads`: of the results, in any type, added up in float32; `grad_sum`: what reaches `h` past the norm. `mean` and
    `rstd` (samples·groups) are forward's. `to_weight`, `to_bias`: whether theirs are wanted.
    """
    if not on_gpu(h):
        return group_norm_backward_reference(
            grads, grad_sum, h, weight, bias, mean, rstd, groups, silu, inner, to_weight, to_bias, second
        )
    from .triton import group_norm_backward as gpu

    added, scale, shift = map(_contiguous, (grad_sum, weight, bias))
    with on_device_of(h):
        return gpu.backward(
            grads, added, h.contiguous(), scale, shift, mean, rstd, groups, silu, inner, to_weight, to_bias, second
        )


def group_norm_backward_reference(
    grads: Sequence[Tensor],
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    inner: bool,
    to_weight: bool,
    to_bias: bool,
    second: torch.dtype | None,
) -> list[Tensor]:
    """The same in plain torch."""
    rows = _rows(h, groups)
    value = ((rows.float() - mean[:, None]) * rstd[:, None]).view(h.shape)
    grad = torch.stack([grad.float() for grad in grads]).sum(0)
    if silu:
        out = _scaled(value, weight, bias, h.dtype if inner else None)
        grad = grad * (out.sigmoid() * (1 + out * (1 - out.sigmoid())))
    inward = grad if weight is None else grad * _by_channel(weight, grad)
    past = None if grad_sum is None else _rows(grad_sum, groups)
    found = norm_backward_reference(
        [_rows(inward, groups)], past, rows, None, mean, rstd, rows.shape[1], False, False, False, second
    )
    others = [dim for dim in range(h.dim()) if dim != 1]
    sums = [(grad * value).sum(others)] if to_weight else []
    return [*(each.view(h.shape) for each in found), *sums, *([grad.sum(others)] if to_bias else [])]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, _, bias, groups, _, silu, inner, *_ = inputs
    remember(ctx, inputs[:4], output, True, bias if silu else None)
    ctx.how = groups, silu, inner


def _backward(ctx: Any, received: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    h, weight, mean, rstd, bias = ctx.saved_tensors

    def backward(grads: list[Tensor], grad_sum: Tensor | None, *wanted: Any) -> list[Tensor]:
        return group_norm_backward(grads, grad_sum, h, weight, bias, mean, rstd, *ctx.how, *wanted)

    return *differentiated(ctx, received, h.dtype, backward), *[None] * 7


group_norm.register_autograd(_backward, setup_context=_remember)
GROUP_NORM = torch.ops.ampcompile.group_norm.default
