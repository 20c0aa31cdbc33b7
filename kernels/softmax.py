"""Softmax over the last dimension with scale and mask folded in, float32 in registers only.

With N rows of W: 6·N·W flops forward, 8·N·W backward. Bytes: forward reads x (2 or 4 a number) and the mask as far as
it is not repeated, and writes the result; backward reads x, the mask and the gradient, and writes one. Kept for
backward: x, in its own type, and 8 bytes a row; the probabilities are computed again, in float32.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.triton_op("ampcompile::softmax", mutates_args=())
def softmax(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    fill: float | None,
    keep: bool,
    scaled_low: bool,
    masked_low: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax(masked(x * scale))` over the last dimension, in `dtype`; maximum and sum of exponentials of each row.

    `x`: float32, float16 or bfloat16, (..., row). `mask`, which broadcasts to `x`: added, if there is no `fill`; else
    boolean, and `fill` replaces what it names, or what it doesn't, if `keep`. `scaled_low`, `masked_low`: the scaled,
    the masked value is rounded to the type of `x`. Maximum and sum are float32 (rows). A row of nothing but -inf gives
    NaN, as torch's does. A mask that is added has a gradient.
    """
    if not on_gpu(x):
        return softmax_reference(x, mask, scale, fill, keep, scaled_low, masked_low, dtype)
    from .triton import softmax as gpu

    return gpu.forward(x.contiguous(), mask, scale, fill, keep, scaled_low, masked_low, dtype)


def on_gpu(x: Tensor) -> bool:
    """Whether there is something to launch a kernel for. An unknown size is at least two."""
    return x.is_cuda and not (isinstance(x.numel(), int) and x.numel() == 0)


def _scores(
    x: Tensor, mask: Tensor | None, scale: float, fill: float | None, keep: bool, scaled_low: bool, masked_low: bool
) -> Tensor:
    value = x.float() * scale
    value = value.to(x.dtype).float() if scaled_low else value
    if mask is None:
        return value
    if fill is not None:
        return value.masked_fill(~mask if keep else mask, fill)
    value = value + mask.float()
    return value.to(x.dtype).float() if masked_low else value


def softmax_reference(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    fill: float | None,
    keep: bool,
    scaled_low: bool,
    masked_low: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch."""
    value = _scores(x, mask, scale, fill, keep, scaled_low, masked_low)
    if x.numel() == 0:
        rows = value.new_empty(value.shape[:-1].numel())
        return value.to(dtype), rows, rows.clone()
    maximum = value.amax(-1, keepdim=True)
    powers = (value - maximum).exp()
    total = powers.sum(-1, keepdim=True)
    return (powers / total).to(dtype), maximum.reshape(-1), total.reshape(-1)


@torch.library.triton_op("ampcompile::softmax_backward", mutates_args=())
def softmax_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    scale: float,
    fill: float | None,
    keep: bool,
    scaled_low: bool,
    masked_low: bool,
) -> Tensor:
    """The gradient of `x`, in its type. `grad`: of the result, in any type; all others are forward's."""
    if not on_gpu(x):
        return softmax_backward_reference(grad, x, mask, maximum, total, scale, fill, keep, scaled_low, masked_low)
    from .triton import softmax as gpu

    kinds = scale, fill, keep, scaled_low, masked_low
    return gpu.backward(grad.contiguous(), x.contiguous(), mask, maximum, total, *kinds)


def softmax_backward_reference(
    grad: Tensor,
    x: Tensor,
    mask: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    scale: float,
    fill: float | None,
    keep: bool,
    scaled_low: bool,
    masked_low: bool,
) -> Tensor:
    """The same in plain torch."""
    kinds = scale, fill, keep, scaled_low, masked_low
    return (_to_masked(grad, x, mask, maximum, total, *kinds) * scale).to(x.dtype)


def _to_masked(grad: Tensor, x: Tensor, mask: Tensor | None, maximum: Tensor, total: Tensor, *kinds: Any) -> Tensor:
    """The gradient of the scaled value, in float32; of an added mask, too, before it was repeated."""
    shape = (*x.shape[:-1], 1)
    out = (_scores(x, mask, *kinds) - maximum.reshape(shape)).exp() / total.reshape(shape)
    product = grad.float() * out
    result = product - out * product.sum(-1, keepdim=True)
    _, fill, keep, *_ = kinds
    return result if mask is None or fill is None else result.masked_fill(~mask if keep else mask, 0.0)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, *ctx.kinds, _ = inputs
    ctx.save_for_backward(x, mask, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, mask, maximum, total = ctx.saved_tensors
    to_x, to_mask = ctx.needs_input_grad[:2]
    if grad is None:
        return (None,) * 8
    if not to_mask:
        return softmax_backward(grad, x, mask, maximum, total, *ctx.kinds), *[None] * 7
    both = _to_masked(grad, x, mask, maximum, total, *ctx.kinds)  # a sum over heads or batches: left to the compiler
    return (both * ctx.kinds[0]).to(x.dtype) if to_x else None, both.sum_to_size(mask.shape).to(mask.dtype), *[None] * 6


softmax.register_autograd(_backward, setup_context=_remember)
SOFTMAX = torch.ops.ampcompile.softmax.default
