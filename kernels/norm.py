"""Layer norm and RMS norm in one pass over memory: residual added before, result rounded behind, float32 in registers.

With N rows of width W: 8·N·W flops forward, 16·N·W backward. Bytes: forward reads x and the residual once and writes
the sum and each result once, 2 or 4 bytes a number as their types are; backward reads the sum and every gradient once
and writes one. Kept for backward: the sum (or x), in its own type, and 4 or 8 bytes a row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private.dispatcher import triton_op

from .usable import on_device_of


@torch.library.custom_op("ampcompile::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """A tensor of its own with the same numbers, so that gradients meet in float32: `merge_copies` takes it out
    after differentiation."""
    return x.clone()


@copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@triton_op("ampcompile::norm")
def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centered: bool,
    inner: bool,
    wide: bool,
    low: torch.dtype,
    lows: int,
) -> list[Tensor]:
    """`norm(x + residual) * weight + bias`, over the last `width` numbers: layer norm if `centered`, else RMS norm.

    `x`, `residual`: float32, float16 or bfloat16, of one shape that ends in `width` numbers a row. `weight`, `bias`:
    `width` numbers of any of these types. `inner`: the normed value is rounded to the type of the sum before it is
    multiplied by `weight`. Returns, in this order: mean of each row, if `centered`, and its reciprocal deviation,
    float32 (rows); the sum, if there is a `residual`, in the type that torch's addition gives; the result in float32,
    if `wide`; the result in `low`, `lows` times, each for one reader: their gradients are added up in float32.
    """
    if on_gpu(x):
        from .triton import norm as gpu

        rows = x.reshape(-1, width).contiguous()
        added = None if residual is None else residual.reshape(-1, width).contiguous()
        scale, shift = (None if v is None else v.reshape(-1).contiguous() for v in (weight, bias))
        with on_device_of(rows):
            found = gpu.forward(rows, added, scale, shift, eps, centered, inner, wide, low if lows else None)
    else:
        found = norm_reference(x, residual, weight, bias, width, eps, centered, inner, wide, low if lows else None)
    *statistics, h, wide_out, low_out = found
    shaped = [t.view(x.shape) for t in (h, wide_out, low_out) if t is not None]
    shaped += [copied(shaped[-1]) for _ in range(lows - 1)]
    return [*(t for t in statistics if t is not None), *shaped]


def on_gpu(x: Tensor) -> bool:
    """Whether there is something to launch a kernel for. An unknown size is at least two."""
    return x.is_cuda and not (isinstance(x.numel(), int) and x.numel() == 0)


def norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centered: bool,
    inner: bool,
    wide: bool,
    low: torch.dtype | None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same in plain torch: mean, reciprocal deviation, sum, wide and low result, those asked for."""
    h = x if residual is None else x + residual
    value = h.reshape(-1, width).float()
    mean = value.mean(1) if centered else None
    value = value if mean is None else value - mean[:, None]
    rstd = (value.square().mean(1) + eps).rsqrt()
    out = value * rstd[:, None]
    out = out.to(h.dtype).float() if inner else out
    out = out if weight is None else out * weight.reshape(-1)
    out = (out if bias is None else out + bias.reshape(-1)).reshape(x.shape)
    return mean, rstd, None if residual is None else h, out if wide else None, None if low is None else out.to(low)


@triton_op("ampcompile::norm_backward")
def norm_backward(
    grads: Sequence[Tensor],
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    width: int,
    inner: bool,
    to_weight: bool,
    to_bias: bool,
    second: torch.dtype | None,
) -> list[Tensor]:
    """The gradient of `h`, what was normed, in its type and in `second`, if given; those of weight and bias, float32.

    `grads`: of the results, in any type, added up in float32; `grad_sum`: what reaches `h` past the norm. `mean` and
    `rstd` (rows) are forward's, no `mean` stands for an RMS norm. `to_weight`, `to_bias`: whether theirs are wanted.
    """
    if not on_gpu(h):
        return norm_backward_reference(grads, grad_sum, h, weight, mean, rstd, width, inner, to_weight, to_bias, second)
    from .triton import norm_backward as gpu

    added = None if grad_sum is None else grad_sum.reshape(-1, width).contiguous()
    scale = None if weight is None else weight.reshape(-1).contiguous()
    rows = h.reshape(-1, width).contiguous()
    with on_device_of(rows):
        found = gpu.backward(grads, added, rows, scale, mean, rstd, inner, to_weight, to_bias, second)
    own = 1 + (second is not None)
    return [*(t.view(h.shape) for t in found[:own]), *found[own:]]


def norm_backward_reference(
    grads: Sequence[Tensor],
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    width: int,
    inner: bool,
    to_weight: bool,
    to_bias: bool,
    second: torch.dtype | None,
) -> list[Tensor]:
    """The same in plain torch."""
    value = h.reshape(-1, width).float()
    value = (value if mean is None else value - mean[:, None]) * rstd[:, None]
    grad = torch.stack([grad.float() for grad in grads]).sum(0).reshape(value.shape)
    scaled = grad if weight is None else grad * weight.reshape(-1)
    out = scaled - value * (scaled * value).mean(1, keepdim=True)
    out = (out if mean is None else out - scaled.mean(1, keepdim=True)) * rstd[:, None]
    out = (out if grad_sum is None else out + grad_sum.reshape(value.shape)).reshape(h.shape)
    found = [out.to(h.dtype)] + ([] if second is None else [out.to(second)])
    if to_weight:
        found.append((grad * (value.to(h.dtype).float() if inner else value)).sum(0))
    return [*found, grad.sum(0)] if to_bias else found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, _, _, width, _, centered, inner, *_ = inputs
    remember(ctx, inputs[:4], output, centered)
    ctx.how = width, inner


def remember(ctx: Any, inputs: Sequence[Any], output: list[Tensor], centered: bool, *more: Tensor | None) -> None:
    """Keep for backward, of a norm's first four operands: what was normed, the weight, mean, reciprocal deviation."""
    x, residual, weight, bias = inputs
    mean = output[0] if centered else None
    ctx.save_for_backward(x if residual is None else output[1 + centered], weight, mean, output[centered], *more)
    ctx.results = 1 + centered + (residual is not None)
    ctx.of = [None if t is None else t.dtype for t in inputs]
    ctx.shapes = [None if t is None else t.shape for t in (weight, bias)]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, received: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    h, weight, mean, rstd = ctx.saved_tensors

    def backward(grads: list[Tensor], grad_sum: Tensor | None, *wanted: Any) -> list[Tensor]:
        return norm_backward(grads, grad_sum, h, weight, mean, rstd, *ctx.how, *wanted)

    return *differentiated(ctx, received, h.dtype, backward), *[None] * 7


def differentiated(
    ctx: Any, received: list[Tensor | None], of_h: torch.dtype, backward: Callable[..., list[Tensor]]
) -> tuple[Tensor | None, ...]:
    """The gradients of a norm's first four operands, of the types they have.

    `backward` gets the gradients of the results and of the sum, whether those of weight and bias are wanted, and the
    second type for that of the sum.
    """
    of_x, of_residual, of_weight, of_bias = ctx.of
    grads = [grad for grad in received[ctx.results :] if grad is not None]
    grad_sum = None if of_residual is None else received[ctx.results - 1]
    to_x, to_residual, to_weight, to_bias = ctx.needs_input_grad[:4]
    if not grads:
        return _cast(grad_sum, of_x), _cast(grad_sum, of_residual), None, None
    second = next((dtype for dtype in (of_x, of_residual) if dtype not in (of_h, None)), None)
    found = backward(grads, grad_sum, to_weight, to_bias, second)
    by_type = {of_h: found.pop(0)} | ({} if second is None else {second: found.pop(0)})
    grad_weight = found.pop(0).to(of_weight).view(ctx.shapes[0]) if to_weight else None
    grad_bias = found.pop(0).to(of_bias).view(ctx.shapes[1]) if to_bias else None
    x, residual = by_type[of_x] if to_x else None, by_type[of_residual] if to_residual else None
    return x, residual, grad_weight, grad_bias


def _cast(grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if grad is None or dtype is None else grad.to(dtype)


norm.register_autograd(_backward, setup_context=_remember)
NORM = torch.ops.ampcompile.norm.default
COPIED = torch.ops.ampcompile.copied.default
