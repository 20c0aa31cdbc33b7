"""A linear layer and the cross entropy of its result, a piece of the rows at a time: logits never exist as a whole.

With N rows of D features and C classes: 2·N·D·C flops forward and 6·N·D·C backward, a third more than apart, since
backward computes the logits again. Memory: `PIECE` bytes of logits at a time, instead of 2·N·C or more; for backward
x and 8 bytes a row are saved. Bytes moved: 14·N·C, where Inductor's own code moves 12·N·C; and the weight, 2·D·C bytes,
three times a piece, and its float32 gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cross_entropy import (
    Coefficients,
    Kind,
    coefficients,
    cross_entropy_reference,
    gradient,
    loss_of_rows,
    picked_logits,
    row_sums,
)
from .usable import on_device_of

PIECE = 2**28
"""Approximate bytes of logits at a time: 2048 rows of 50257 classes, enough to keep a GPU busy with one product."""
FEWEST = 256
"""Fewest rows of a piece; on the CPU every piece has so many, because plain torch makes float32 copies of a piece."""


@torch.library.custom_op("ampcompile::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_weight: Tensor,
    low_bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy(F.linear(x, low_weight, low_bias), target, ...)`; see `kernels.cross_entropy` for the results.

    `x`: (rows, features), float16 or bfloat16, in which logits are rounded. `low_weight`: (classes, features), in that
    type; `low_bias`: (classes,). They are copies of `weight` and `bias`, or the same tensors. Gradients flow to
    `weight` and `bias`: summed over all rows in float32, then cast to their types.
    """
    kind = Kind(reduction, ignore_index, label_smoothing, z_loss)
    lse, picked, weighted = [], [], []
    for rows in _pieces(x, low_weight):
        logits = _logits(x[rows], low_weight, low_bias)
        sums, total = row_sums(logits, class_weight, label_smoothing != 0)
        lse.append(sums)
        picked.append(picked_logits(logits, target[rows], ignore_index))
        weighted += [] if total is None else [total]
        del logits
    of_rows = torch.cat(lse, 1), torch.cat(picked), torch.cat(weighted) if weighted else None
    return loss_of_rows(*of_rows, target, class_weight, low_weight.shape[0], kind), of_rows[0]


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_weight: Tensor,
    low_bias: Tensor | None,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` in plain torch, all logits at once."""
    logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return cross_entropy_reference(logits, *rest, **options)


@linear_cross_entropy.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    reduction = others[6] if len(others) > 6 else "mean"
    rows = x.new_empty(x.shape[0], dtype=torch.float32)
    return rows if reduction == "none" else rows.new_empty(()), rows.new_empty((2, x.shape[0]))


@torch.library.custom_op("ampcompile::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    low_weight: Tensor,
    low_bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, in its type, and of weight and bias, float32; empty if they aren't `wanted`."""
    kind = Kind(reduction, ignore_index, label_smoothing, z_loss)
    classes = low_weight.shape[0]
    of_rows = coefficients(grad, lse, target, class_weight, classes, kind)
    to_x, to_weight, to_bias = _gradients(x, low_weight, wanted)
    for rows in _pieces(x, low_weight):
        logits = _logits(x[rows], low_weight, low_bias)
        logits = _gradient_(logits, lse[:, rows], target[rows], class_weight, of_rows.of(rows))
        if wanted[0]:
            torch.mm(logits, low_weight, out=to_x[rows])
        if wanted[1]:
            to_weight += _weight_gradient(logits, x[rows])
        if wanted[2]:
            to_bias += logits.sum(0, dtype=torch.float32)
        del logits
    return to_x, to_weight, to_bias


@linear_cross_entropy_backward.register_fake
def _(grad: Tensor, x: Tensor, low_weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, low_weight, others[-1])


def _gradients(x: Tensor, low_weight: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    to_x = x.new_empty(x.shape if wanted[0] else (0,))
    to_weight = x.new_zeros(low_weight.shape if wanted[1] else (0,), dtype=torch.float32)
    return to_x, to_weight, x.new_zeros(low_weight.shape[:1] if wanted[2] else (0,), dtype=torch.float32)


def _logits(x: Tensor, low_weight: Tensor, low_bias: Tensor | None) -> Tensor:
    """`F.linear`; on a GPU rows begin at multiples of 16 bytes: of others, products take several times as long."""
    classes, step = low_weight.shape[0], 16 // x.itemsize
    if not x.is_cuda or classes % step == 0:
        return F.linear(x, low_weight, low_bias)
    logits = x.new_empty(x.shape[0], -(-classes // step) * step)[:, :classes]
    if low_bias is None:
        return torch.mm(x, low_weight.t(), out=logits)
    return torch.addmm(low_bias, x, low_weight.t(), out=logits)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` (rows, classes) transposed @ `x` (rows, features), both 16-bit, in the float32 in which it is summed."""
    if grad.is_cuda:
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    return grad.float().t() @ x.float()


def _gradient_(logits: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, rows: Coefficients) -> Tensor:
    """The gradient of logits, on a GPU written over them."""
    if not logits.is_cuda:
        return gradient(logits, lse, target, weight, rows)
    from .triton import cross_entropy as gpu

    with on_device_of(logits):
        gpu.gradient_(logits, lse, target, weight, *rows)
    return logits


def _pieces(x: Tensor, low_weight: Tensor) -> Iterator[slice]:
    """Yield the rows of each piece; one empty piece if there are no rows."""
    step = max(FEWEST, PIECE // (low_weight.shape[0] * x.itemsize) // 128 * 128) if x.is_cuda else FEWEST
    return (slice(begin, begin + step) for begin in range(0, max(1, x.shape[0]), step))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, low_weight, low_bias, target, class_weight, *kind = inputs
    ctx.save_for_backward(x, low_weight, low_bias, target, class_weight, output[1])
    ctx.kind = tuple(kind)
    ctx.types = [weight.dtype, None if bias is None else bias.dtype]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    wanted = list(ctx.needs_input_grad[:3])
    to_x, to_weight, to_bias = linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.kind, wanted)
    of_weight, of_bias = ctx.types
    return (
        to_x if wanted[0] else None,
        to_weight.to(of_weight) if wanted[1] else None,
        to_bias.to(of_bias) if wanted[2] else None,
        *[None] * 8,
    )


linear_cross_entropy.register_autograd(_backward, setup_context=_remember)
LINEAR_CROSS_ENTROPY = torch.ops.ampcompile.linear_cross_entropy.default
