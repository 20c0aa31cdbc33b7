"""Group norm, float32 in registers only; see `ampcompile.kernels.group_norm`.

The numbers of a sample's group are a row: one channel after the other. A program has one row, which it reads twice,
the second time from the cache: for its statistics as it lies in memory, then channels by places.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .norm import moments, summed
from .rounding import narrowed

TILE = 2048
"""Numbers that a program takes at a time at most."""
PLACES = 512
"""Places of a channel in a tile, where their number is a symbol."""


class Row(NamedTuple):
    """Sizes of a row, and of the tile that a program takes at a time: channels by places."""

    per_group: int
    places: int
    channels_tile: int
    places_tile: int

    @property
    def warps(self) -> int:
        """So many that a thread has eight numbers: 16 bytes of a 16-bit type. Backward keeps two sums for each."""
        return max(1, self.channels_tile * self.places_tile // 256)


def row_of(x: Tensor, groups: int) -> Row:
    """The one rule; depends on the channels of a group, and on their places, if those are known."""
    per_group, places = x.shape[1] // groups, math.prod(x.shape[2:])
    across = min(TILE, triton.next_power_of_2(places)) if isinstance(places, int) else PLACES
    return Row(per_group, places, min(max(1, TILE // across), triton.next_power_of_2(per_group)), across)


@triton.jit
def scaled(value, weight, bias, channel, exists, TO: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
           INNER: tl.constexpr):  # fmt: skip
    """What SiLU gets."""
    if HAS_WEIGHT:
        value *= tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        value += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[:, None]
    if INNER:
        value = narrowed(value, TO).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["groups", "per_group"])
def amp_group_norm(
    x, residual, weight, bias, h, wide, low, means, rstds, groups, per_group, places, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    INNER: tl.constexpr, HAS_WIDE: tl.constexpr, HAS_LOW: tl.constexpr,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    SUM: tl.constexpr = h.dtype.element_ty
    TILE: tl.constexpr = CHANNELS * PLACES
    row = tl.program_id(0).to(tl.int64)
    width = per_group * places
    start = row * width
    x, residual, h, wide, low = x + start, residual + start, h + start, wide + start, low + start
    mean = tl.zeros([1], tl.float32)
    squares = tl.zeros([1], tl.float32)
    for begin in range(0, width, TILE):
        column = begin + tl.arange(0, TILE)
        there = (column < width)[None, :]
        value = summed(x, residual, column[None, :], there, HAS_RESIDUAL, SUM)
        mean, squares = moments(value, there, begin, tl.minimum(width - begin, TILE), mean, squares, True)
    rstd = 1.0 / tl.sqrt(squares / width + eps)
    for first in range(0, per_group, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        exists = channel < per_group
        for begin in range(0, places, PLACES):
            place = begin + tl.arange(0, PLACES)
            there = exists[:, None] & (place < places)[None, :]
            at = channel[:, None] * places + place[None, :]
            value = summed(x, residual, at, there, HAS_RESIDUAL, SUM)
            if HAS_RESIDUAL:
                tl.store(h + at, narrowed(value, SUM), mask=there)
            out = scaled(
                (value - mean[:, None]) * rstd[:, None], weight, bias, row % groups * per_group + channel, exists,
                SUM, HAS_WEIGHT, HAS_BIAS, INNER,
            )  # fmt: skip
            if SILU:
                out *= tl.sigmoid(out)
            if HAS_WIDE:
                tl.store(wide + at, out, mask=there)
            if HAS_LOW:
                tl.store(low + at, narrowed(out, low.dtype.element_ty), mask=there)
    one = tl.arange(0, 1)
    tl.store(means + row + one, mean)
    tl.store(rstds + row + one, rstd)


def forward(
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
    """Mean, reciprocal deviation, sum, wide and low result of contiguous operands, `x` (samples, channels, ...)."""
    row = row_of(x, groups)
    h = None if residual is None else torch.empty_like(x, dtype=torch.result_type(x, residual))
    wide_out = torch.empty_like(x, dtype=torch.float32) if wide else None
    low_out = None if low is None else torch.empty_like(x, dtype=low)
    mean, rstd = (torch.empty((x.shape[0] * groups,), dtype=torch.float32, device=x.device) for _ in range(2))
    wrap_triton(amp_group_norm)[(x.shape[0] * groups,)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if bias is None else bias,
        x if h is None else h,
        x if wide_out is None else wide_out,
        x if low_out is None else low_out,
        mean,
        rstd,
        groups,
        row.per_group,
        row.places,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        SILU=silu,
        INNER=inner,
        HAS_WIDE=wide,
        HAS_LOW=low is not None,
        CHANNELS=row.channels_tile,
        PLACES=row.places_tile,
        num_warps=row.warps,
    )
    return mean, rstd, h, wide_out, low_out
