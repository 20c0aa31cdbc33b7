"""Softmax of scaled and masked rows, float32 in registers only; see `ampcompile.kernels.softmax`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .norm import tile_of
from .rounding import narrowed

NONE, ADDED, FILLED, KEPT = range(4)
"""What a mask does: nothing, it is added, what it names is replaced, what it doesn't name is replaced."""


@triton.jit
def tile_at(row, exists, begin, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS: tl.constexpr):
    """Which numbers of a tile there are, where they are, and where their mask is, repeated along four dimensions."""
    column = begin + tl.arange(0, COLUMNS)
    there = exists[:, None] & (column < width)[None, :]
    others = row // size_2
    mask_row = others // size_1 * stride_0 + others % size_1 * stride_1 + row % size_2 * stride_2
    return there, row[:, None] * width + column[None, :], mask_row[:, None] + column[None, :] * stride_3


@triton.jit
def replaced(mask, mask_at, there, MASK: tl.constexpr):
    """Which values the mask replaces."""
    named = tl.load(mask + mask_at, mask=there, other=0).to(tl.int1)
    if MASK == 3:
        return named == 0
    return named


@triton.jit
def scores(
    x, mask, at, mask_at, there, scale, fill,
    MASK: tl.constexpr, SCALED_LOW: tl.constexpr, MASKED_LOW: tl.constexpr,
):  # fmt: skip
    """The values whose exponentials are taken, in float32, rounded as the graph rounds them; -inf outside."""
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * scale
    if SCALED_LOW:
        value = narrowed(value, x.dtype.element_ty).to(tl.float32)
    if MASK == 1:
        value += tl.load(mask + mask_at, mask=there, other=0.0).to(tl.float32)
        if MASKED_LOW:
            value = narrowed(value, x.dtype.element_ty).to(tl.float32)
    elif MASK > 1:
        value = tl.where(replaced(mask, mask_at, there, MASK), fill, value)
    return tl.where(there, value, float("-inf"))


@triton.jit(do_not_specialize=["rows", "size_1", "size_2"])
def forward_kernel(
    x, mask, out, maxima, totals, rows, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, scale, fill,
    MASK: tl.constexpr, SCALED_LOW: tl.constexpr, MASKED_LOW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile of rows a program; a row wider than a tile is read twice."""
    LOW: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if WHOLE:
        there, at, mask_at = tile_at(
            row, exists, 0, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS
        )
        value = scores(x, mask, at, mask_at, there, scale, fill, MASK, SCALED_LOW, MASKED_LOW)
        maximum = tl.max(value, 1)
        powers = tl.exp(value - maximum[:, None])
        total = tl.sum(powers, 1)
        tl.store(out + at, narrowed(powers / total[:, None], LOW), mask=there)
    else:
        for begin in range(0, width, COLUMNS):
            there, at, mask_at = tile_at(
                row, exists, begin, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS
            )
            value = scores(x, mask, at, mask_at, there, scale, fill, MASK, SCALED_LOW, MASKED_LOW)
            larger = tl.maximum(maximum, tl.max(value, 1))
            shift = tl.where(larger == float("-inf"), 0.0, larger)  # nothing but -inf so far
            total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(value - shift[:, None]), 1)
            maximum = larger
        for begin in range(0, width, COLUMNS):
            there, at, mask_at = tile_at(
                row, exists, begin, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS
            )
            value = scores(x, mask, at, mask_at, there, scale, fill, MASK, SCALED_LOW, MASKED_LOW)
            tl.store(out + at, narrowed(tl.exp(value - maximum[:, None]) / total[:, None], LOW), mask=there)
    tl.store(maxima + row, maximum, mask=exists)
    tl.store(totals + row, total, mask=exists)


@triton.jit
def pass_on(
    share, product, mean, mask, out, at, mask_at, there, scale, MASK: tl.constexpr
):  # fmt: skip
    """Store the gradient of a tile."""
    result = product - share * mean[:, None]
    if MASK > 1:
        result = tl.where(replaced(mask, mask_at, there, MASK), 0.0, result)
    tl.store(out + at, narrowed(result * scale, out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "size_1", "size_2"])
def backward_kernel(
    grad, x, mask, maxima, totals, out, rows, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3,
    scale, fill, MASK: tl.constexpr, SCALED_LOW: tl.constexpr, MASKED_LOW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The same tiles, the probabilities computed again."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    maximum = tl.load(maxima + row, mask=exists, other=0.0)[:, None]
    total = tl.load(totals + row, mask=exists, other=1.0)[:, None]
    mean = tl.zeros([ROWS], tl.float32)
    if WHOLE:
        there, at, mask_at = tile_at(
            row, exists, 0, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS
        )
        value = scores(x, mask, at, mask_at, there, scale, fill, MASK, SCALED_LOW, MASKED_LOW)
        share = tl.exp(value - maximum) / total
        product = share * tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        pass_on(share, product, tl.sum(product, 1), mask, out, at, mask_at, there, scale, MASK)
    else:
        for begin in range(0, width, COLUMNS):
            there, at, mask_at = tile_at(
                row, exists, begin, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS
            )
            value = scores(x, mask, at, mask_at, there, scale, fill, MASK, SCALED_LOW, MASKED_LOW)
            share = tl.exp(value - maximum) / total
            mean += tl.sum(share * tl.load(grad + at, mask=there, other=0.0).to(tl.float32), 1)
        for begin in range(0, width, COLUMNS):
            there, at, mask_at = tile_at(
                row, exists, begin, width, size_1, size_2, stride_0, stride_1, stride_2, stride_3, COLUMNS
            )
            value = scores(x, mask, at, mask_at, there, scale, fill, MASK, SCALED_LOW, MASKED_LOW)
            share = tl.exp(value - maximum) / total
            product = share * tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
            pass_on(share, product, mean, mask, out, at, mask_at, there, scale, MASK)


def forward(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    fill: float | None,
    keep: bool,
    scaled_low: bool,
    masked_low: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ampcompile.kernels.softmax.softmax`; `x` is contiguous."""
    out = torch.empty_like(x, dtype=dtype)
    rows = x.numel() // x.shape[-1]
    maximum = torch.empty((rows,), dtype=torch.float32, device=x.device)
    total = torch.empty_like(maximum)
    grid, arguments, constants = _launch(x, mask, rows, scale, fill, keep, scaled_low, masked_low)
    wrap_triton(forward_kernel)[grid](x, x if mask is None else mask, out, maximum, total, *arguments, **constants)
    return out, maximum, total


def backward(
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
    """See `ampcompile.kernels.softmax.softmax_backward`; `grad` and `x` are contiguous."""
    out = torch.empty_like(x)
    grid, arguments, constants = _launch(x, mask, total.shape[0], scale, fill, keep, scaled_low, masked_low)
    given = grad, x, x if mask is None else mask, maximum, total, out
    wrap_triton(backward_kernel)[grid](*given, *arguments, **constants)
    return out


def _launch(
    x: Tensor, mask: Tensor | None, rows: int, scale: float, fill: float | None, keep: bool, *low: bool
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments after the tensors, constants."""
    width = x.shape[-1]
    tile = tile_of(width)
    sizes: tuple[int, ...] = (1, 1, 1, width)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        sizes = (1,) * (4 - x.dim()) + tuple(x.shape)
        strides = (0,) * (4 - x.dim()) + mask.expand(x.shape).stride()
    kind = NONE if mask is None else ADDED if fill is None else KEPT if keep else FILLED
    constants = {
        **{"MASK": kind, "SCALED_LOW": low[0], "MASKED_LOW": low[1]},
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "WHOLE": tile.whole, "num_warps": tile.warps},
    }
    return (triton.cdiv(rows, tile.rows),), (rows, width, *sizes[1:3], *strides, scale, fill or 0.0), constants
