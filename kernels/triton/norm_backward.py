"""The backward of layer and RMS norms; see `ampcompile.kernels.norm`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .norm import tile_of
from .rounding import narrowed

PROGRAMS = 256
"""Each adds up its rows' share of the weight's gradient, in an order that no device changes."""
GRADS = 4
"""Gradients of results that the kernel adds up itself."""


@triton.jit
def incoming(g0, g1, g2, g3, at, there, COUNT: tl.constexpr):
    """The gradient of the result: that of its copies, added up in float32."""
    total = tl.load(g0 + at, mask=there, other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(g1 + at, mask=there, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(g2 + at, mask=there, other=0.0).to(tl.float32)
    if COUNT > 3:
        total += tl.load(g3 + at, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def normed(h, mean, rstd, at, there):
    """The normed value once more."""
    return (tl.load(h + at, mask=there, other=0.0).to(tl.float32) - mean[:, None]) * rstd[:, None]


@triton.jit
def scaled(grad, weight, column, inside, HAS_WEIGHT: tl.constexpr):
    """The gradient of the normed value."""
    if HAS_WEIGHT:
        return grad * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return grad


@triton.jit
def pass_on(
    inner, value, first_mean, second_mean, rstd, grad_sum, first, second, at, there,
    HAS_SUM: tl.constexpr, HAS_SECOND: tl.constexpr,
):  # fmt: skip
    """Store the gradient of what was normed, in one type or two."""
    out = (inner - first_mean[:, None] - value * second_mean[:, None]) * rstd[:, None]
    if HAS_SUM:
        out += tl.load(grad_sum + at, mask=there, other=0.0).to(tl.float32)
    tl.store(first + at, narrowed(out, first.dtype.element_ty), mask=there)
    if HAS_SECOND:
        tl.store(second + at, narrowed(out, second.dtype.element_ty), mask=there)


@triton.jit
def add_to(sums, column, inside, value):
    """Add to what this program has written itself, in whichever of its threads."""
    tl.debug_barrier()
    tl.store(sums + column, tl.load(sums + column, mask=inside) + tl.sum(value, 0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def amp_norm_backward(
    g0, g1, g2, g3, grad_sum, h, weight, means, rstds, first, second, to_weight, to_bias, rows, width,
    COUNT: tl.constexpr, HAS_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SECOND: tl.constexpr,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, CENTERED: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Every so many tiles of rows; the gradients of weight and bias are summed over them, one row a program."""
    column = tl.arange(0, COLUMNS)
    to_weight += tl.program_id(0) * width
    to_bias += tl.program_id(0) * width
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        exists = row < rows
        rstd = tl.load(rstds + row, mask=exists, other=0.0)
        mean = tl.zeros([ROWS], tl.float32)
        if CENTERED:
            mean = tl.load(means + row, mask=exists, other=0.0)
        first_mean = tl.zeros([ROWS], tl.float32)
        second_mean = tl.zeros([ROWS], tl.float32)
        if WHOLE:
            inside = column < width
            there = exists[:, None] & inside[None, :]
            at = row[:, None] * width + column[None, :]
            grad = incoming(g0, g1, g2, g3, at, there, COUNT)
            value = normed(h, mean, rstd, at, there)
            inner = scaled(grad, weight, column, inside, HAS_WEIGHT)
            if CENTERED:
                first_mean = tl.sum(inner, 1) / width
            second_mean = tl.sum(inner * value, 1) / width
            pass_on(
                inner, value, first_mean, second_mean, rstd, grad_sum, first, second, at, there, HAS_SUM, HAS_SECOND
            )
            if TO_WEIGHT:
                if INNER:
                    value = narrowed(value, h.dtype.element_ty).to(tl.float32)
                weight_sum += grad * value
            if TO_BIAS:
                bias_sum += grad
        else:
            for begin in range(0, width, COLUMNS):
                inside = begin + column < width
                there = exists[:, None] & inside[None, :]
                at = row[:, None] * width + begin + column[None, :]
                grad = incoming(g0, g1, g2, g3, at, there, COUNT)
                value = normed(h, mean, rstd, at, there)
                inner = scaled(grad, weight, begin + column, inside, HAS_WEIGHT)
                if CENTERED:
                    first_mean += tl.sum(inner, 1)
                second_mean += tl.sum(inner * value, 1)
            first_mean /= width
            second_mean /= width
            for begin in range(0, width, COLUMNS):
                inside = begin + column < width
                there = exists[:, None] & inside[None, :]
                at = row[:, None] * width + begin + column[None, :]
                grad = incoming(g0, g1, g2, g3, at, there, COUNT)
                value = normed(h, mean, rstd, at, there)
                inner = scaled(grad, weight, begin + column, inside, HAS_WEIGHT)
                pass_on(
                    inner, value, first_mean, second_mean, rstd, grad_sum, first, second, at, there,
                    HAS_SUM, HAS_SECOND,
                )  # fmt: skip
                if TO_WEIGHT:
                    if INNER:
                        value = narrowed(value, h.dtype.element_ty).to(tl.float32)
                    add_to(to_weight, begin + column, inside, grad * value)
                if TO_BIAS:
                    add_to(to_bias, begin + column, inside, grad)
    if WHOLE:
        inside = column < width
        if TO_WEIGHT:
            tl.store(to_weight + column, tl.sum(weight_sum, 0), mask=inside)
        if TO_BIAS:
            tl.store(to_bias + column, tl.sum(bias_sum, 0), mask=inside)


def at_most_four(grads: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """As many gradients as a kernel takes, contiguous: those of further results are summed before; repeated if few."""
    first, *more = (grad.reshape(shape).contiguous() for grad in grads)
    if len(more) >= GRADS:  # as for keys and values of many layers
        more = [*more[: GRADS - 2], torch.stack([grad.float() for grad in more[GRADS - 2 :]]).sum(0)]
    return [first, *more, *[first] * (GRADS - 1 - len(more))]


def backward(
    grads: Sequence[Tensor],
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    inner: bool,
    to_weight: bool,
    to_bias: bool,
    second: torch.dtype | None,
) -> list[Tensor]:
    """See `ampcompile.kernels.norm.norm_backward`; all operands are contiguous, `h` is (rows, width)."""
    rows, width = h.shape
    tile = tile_of(width, 2)  # the row, and its share of the sums
    first = torch.empty_like(h)
    other = None if second is None else torch.empty_like(h, dtype=second)
    # A symbol would have to be guarded.
    programs = min(PROGRAMS, triton.cdiv(rows, tile.rows)) if isinstance(rows, int) else PROGRAMS
    blank = torch.empty if tile.whole else torch.zeros  # programs that read a row in parts add to what is there
    sums = [
        blank((programs, width), dtype=torch.float32, device=h.device) if wanted else None
        for wanted in (to_weight, to_bias)
    ]
    wrap_triton(amp_norm_backward)[(programs,)](
        *at_most_four(grads, h.shape),
        h if grad_sum is None else grad_sum,
        h,
        h if weight is None else weight,
        rstd if mean is None else mean,
        rstd,
        first,
        first if other is None else other,
        *(rstd if each is None else each for each in sums),
        rows,
        width,
        COUNT=min(len(grads), GRADS),
        HAS_SUM=grad_sum is not None,
        HAS_WEIGHT=weight is not None,
        HAS_SECOND=other is not None,
        TO_WEIGHT=to_weight,
        TO_BIAS=to_bias,
        CENTERED=mean is not None,
        INNER=inner,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WHOLE=tile.whole,
        num_warps=tile.warps,
    )
    return [first, *([] if other is None else [other]), *(each.sum(0) for each in sums if each is not None)]
