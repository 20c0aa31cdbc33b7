"""Quantize many weights to e4m3 on the GPU; see `ampcompile.kernels.fp8`."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .cast_many import TYPES

TILE = 64
"""Rows and columns of a program's tile: lines of 64 bytes are written both plain and transposed."""
COLUMNS = 9
"""Words for each weight, see `_row`."""
INFINITY = tl.constexpr(0x7F7F8000)  # the first number that bfloat16 rounds to infinity
LARGEST = tl.constexpr(448.0)


@triton.jit
def tile_of(words, tiles, FROM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """The program's tile in float32, its rows and columns, which of both are inside, and the words of its weight."""
    tile = tl.load(tiles + tl.program_id(0))
    row = words + COLUMNS * (tile >> 32)
    height, width = tl.load(row + 1), tl.load(row + 2)
    across = (width + TILE - 1) // TILE
    number = tile & 0xFFFFFFFF
    r = (number // across) * TILE + tl.arange(0, TILE)
    c = (number % across) * TILE + tl.arange(0, TILE)
    inside = (r < height)[:, None] & (c < width)[None, :]
    at = tl.load(row).to(tl.pointer_type(FROM)) + r[:, None] * tl.load(row + 3) + c[None, :] * tl.load(row + 4)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32), r, c, inside, row


@triton.jit
def amp_magnitudes(words, tiles, FROM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BY_ROWS: tl.constexpr):
    """Raise a weight's magnitudes to the largest finite ones of a tile; they are compared as integers."""
    x, r, c, _inside, row = tile_of(words, tiles, FROM, TILE, COLUMNS)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits < INFINITY, bits, 0)
    at = tl.load(row + 8).to(tl.pointer_type(tl.int32))
    if BY_ROWS:
        height, width = tl.load(row + 1), tl.load(row + 2)
        tl.atomic_max(at + r, tl.max(bits, axis=1), mask=r < height)
        tl.atomic_max(at + height + c, tl.max(bits, axis=0), mask=c < width)
    else:
        tl.atomic_max(at, tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit
def factors(magnitudes, scales, at, of, inside, LEAST: tl.constexpr, CARRY: tl.constexpr, ABOVE: tl.constexpr):
    """Factors from the magnitudes at some indices of `of`; writes their inverses there, and the magnitudes behind."""
    bits = tl.maximum(tl.load(magnitudes + at, mask=inside, other=0), LEAST)
    exponent = ABOVE - ((bits + CARRY) >> 23)
    tl.store(scales + at, (254 - exponent) << 23, mask=inside)
    tl.store(scales + of + at, bits, mask=inside)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, factor):
    """Numbers times a factor in e4m3: NaN if they aren't finite."""
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scaled = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)
    return tl.where(finite, scaled, float("nan")).to(tl.float8e4nv)


@triton.jit
def amp_quantize(
    words,
    tiles,
    FROM: tl.constexpr,
    LEAST: tl.constexpr,
    CARRY: tl.constexpr,
    ABOVE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """Write a tile in e4m3, plain and transposed, and the scales and magnitudes of its weight, or of its rows."""
    x, r, c, inside, row = tile_of(words, tiles, FROM, TILE, COLUMNS)
    height, width = tl.load(row + 1), tl.load(row + 2)
    magnitudes = tl.load(row + 8).to(tl.pointer_type(tl.int32))
    scales = tl.load(row + 7).to(tl.pointer_type(tl.int32))
    if BY_ROWS:
        of = height + width
        of_rows = factors(magnitudes, scales, r, of, r < height, LEAST, CARRY, ABOVE)
        of_columns = factors(magnitudes, scales, height + c, of, c < width, LEAST, CARRY, ABOVE)
        numbers, turned = rounded(x, of_rows[:, None]), rounded(x, of_columns[None, :])
    else:
        numbers = rounded(x, factors(magnitudes, scales, 0, 1, True, LEAST, CARRY, ABOVE))
        turned = numbers
    plain = tl.load(row + 5).to(tl.pointer_type(tl.float8e4nv))
    other = tl.load(row + 6).to(tl.pointer_type(tl.float8e4nv))
    tl.store(plain + r[:, None] * width + c[None, :], numbers, mask=inside)
    tl.store(other + c[:, None] * height + r[None, :], tl.trans(turned), mask=tl.trans(inside))


def quantize_many_(weights: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], **constants: int) -> None:
    """Launch two kernels for each type of weights and kind of scales; `parts`: those of each weight's buffer.

    All weights are on one device.
    """
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, (weight, (_, _, scales, _)) in enumerate(zip(weights, parts, strict=True)):
        kinds.setdefault((weight.dtype, scales.dim() == 1), []).append(i)
    with torch.no_grad(), tables.on(weights[0].device):
        for kind, chosen in kinds.items():
            _launch(*kind, [weights[i] for i in chosen], [parts[i] for i in chosen], constants)


def _launch(
    dtype: torch.dtype,
    by_rows: bool,
    weights: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    constants: dict[str, int],
) -> None:
    device = weights[0].device
    ends = np.cumsum([scales.numel() for _, _, scales, _ in parts])
    magnitudes = torch.zeros(ends[-1], dtype=torch.int32, device=device)
    places = [magnitudes.data_ptr() + 4 * (end - p[2].numel()) for end, p in zip(ends.tolist(), parts, strict=True)]
    rows = [_row(*each) for each in zip(weights, parts, places, strict=True)]
    tiles = [(i << 32) + np.arange(_tiles(weight)) for i, weight in enumerate(weights)]
    host = tables.host_words(COLUMNS * len(rows) + sum(map(len, tiles)), device)
    host.numpy()[:] = np.concatenate([*rows, *tiles])
    words = host.to(device, non_blocking=True)
    arguments = words, words[COLUMNS * len(rows) :]
    shared = {"FROM": TYPES[dtype], "TILE": TILE, "COLUMNS": COLUMNS, "BY_ROWS": by_rows}
    grid = (len(arguments[1]),)
    amp_magnitudes[grid](*arguments, **shared)
    amp_quantize[grid](*arguments, **shared, **constants)


def _tiles(weight: Tensor) -> int:
    return -(-weight.shape[0] // TILE) * -(-weight.shape[1] // TILE)


def _row(weight: Tensor, parts: Sequence[Tensor], magnitude: int) -> list[int]:
    """A weight's words: its address, sizes and strides; the addresses of its parts; that of its magnitudes."""
    plain, other, scale = (part.data_ptr() for part in parts[:3])
    return [weight.data_ptr(), *weight.shape, *weight.stride(), plain, other, scale, magnitude]
