"""Layer and RMS norms, float32 in registers only; see `ampcompile.kernels.norm`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .rounding import narrowed

WHOLE = 8192
"""Up to here a program keeps a row in registers; a wider one it reads twice, the second time from the cache."""
TILE = 2048
"""Numbers a program takes at least: several rows, if they are narrow."""


class Tile(NamedTuple):
    """Rows and columns that a program takes at a time, and whether the columns are all there are."""

    rows: int
    columns: int
    whole: bool

    @property
    def warps(self) -> int:
        """So many that a thread has sixteen numbers: twice 16 bytes of a 16-bit type."""
        return self.rows * self.columns // 512


def tile_of(width: int, values: int = 1) -> Tile:
    """The one rule; depends on a row's width alone, and on how many values a column has that stay in registers."""
    if width > WHOLE // values:
        return Tile(1, WHOLE // 2, False)
    columns = triton.next_power_of_2(width)
    return Tile(max(1, TILE // columns), columns, True)


@triton.jit
def summed(x, residual, at, there, HAS_RESIDUAL: tl.constexpr, SUM: tl.constexpr):
    """What is normed, in float32: x, or x + residual rounded as the graph rounds it."""
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        value = narrowed(value, SUM).to(tl.float32)
    return value


@triton.jit
def moments(value, there, before, count, mean, squares, CENTERED: tl.constexpr):
    """Mean and squared distances of the `before` numbers seen so far and `count` more (Chan, Golub and LeVeque)."""
    if CENTERED:
        here = tl.sum(value, 1) / count
        apart = tl.where(there, value - here[:, None], 0.0)
        shift = here - mean
        share = count / (before + count)
        return mean + shift * share, squares + tl.sum(apart * apart, 1) + shift * shift * before * share
    return mean, squares + tl.sum(value * value, 1)


@triton.jit
def write(
    value, mean, rstd, weight, bias, h, wide, low, at, column, there, inside,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, INNER: tl.constexpr,
    HAS_WIDE: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    """Store the sum and the results of a tile."""
    if HAS_RESIDUAL:
        tl.store(h + at, narrowed(value, h.dtype.element_ty), mask=there)
    out = (value - mean[:, None]) * rstd[:, None]
    if INNER:
        out = narrowed(out, h.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        out *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_WIDE:
        tl.store(wide + at, out, mask=there)
    if HAS_LOW:
        tl.store(low + at, narrowed(out, low.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def amp_norm(
    x, residual, weight, bias, h, wide, low, means, rstds, rows, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTERED: tl.constexpr,
    INNER: tl.constexpr, HAS_WIDE: tl.constexpr, HAS_LOW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile of rows a program."""
    SUM: tl.constexpr = h.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = row < rows
    mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if WHOLE:
        inside = column < width
        there = exists[:, None] & inside[None, :]
        at = row[:, None] * width + column[None, :]
        value = summed(x, residual, at, there, HAS_RESIDUAL, SUM)
        mean, squares = moments(value, there, 0, width, mean, squares, CENTERED)
        rstd = 1.0 / tl.sqrt(squares / width + eps)
        write(
            value, mean, rstd, weight, bias, h, wide, low, at, column, there, inside,
            HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, INNER, HAS_WIDE, HAS_LOW,
        )  # fmt: skip
    else:
        for begin in range(0, width, COLUMNS):
            there = exists[:, None] & (begin + column < width)[None, :]
            at = row[:, None] * width + begin + column[None, :]
            value = summed(x, residual, at, there, HAS_RESIDUAL, SUM)
            count = tl.minimum(width - begin, COLUMNS)
            mean, squares = moments(value, there, begin, count, mean, squares, CENTERED)
        rstd = 1.0 / tl.sqrt(squares / width + eps)
        for begin in range(0, width, COLUMNS):
            inside = begin + column < width
            there = exists[:, None] & inside[None, :]
            at = row[:, None] * width + begin + column[None, :]
            value = summed(x, residual, at, there, HAS_RESIDUAL, SUM)
            write(
                value, mean, rstd, weight, bias, h, wide, low, at, begin + column, there, inside,
                HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, INNER, HAS_WIDE, HAS_LOW,
            )  # fmt: skip
    if CENTERED:
        tl.store(means + row, mean, mask=exists)
    tl.store(rstds + row, rstd, mask=exists)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    inner: bool,
    wide: bool,
    low: torch.dtype | None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Mean, reciprocal deviation, sum, wide and low result of contiguous operands, `x` (rows, width)."""
    rows, width = x.shape
    tile = tile_of(width)
    h = None if residual is None else torch.empty_like(x, dtype=torch.result_type(x, residual))
    wide_out = torch.empty_like(x, dtype=torch.float32) if wide else None
    low_out = None if low is None else torch.empty_like(x, dtype=low)
    rstd = torch.empty((rows,), dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centered else None
    wrap_triton(amp_norm)[(triton.cdiv(rows, tile.rows),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if bias is None else bias,
        x if h is None else h,
        x if wide_out is None else wide_out,
        x if low_out is None else low_out,
        rstd if mean is None else mean,
        rstd,
        rows,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        CENTERED=centered,
        INNER=inner,
        HAS_WIDE=wide,
        HAS_LOW=low is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WHOLE=tile.whole,
        num_warps=tile.warps,
    )
    return mean, rstd, h, wide_out, low_out
