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
INFINITY = tl.constexpr(0x7F800000)
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
def amp_magnitudes(words, tiles, FROM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Raise a weight's magnitude to the largest finite one of a tile; they are compared as integers."""
    x, _r, _c, _inside, row = tile_of(words, tiles, FROM, TILE, COLUMNS)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits < INFINITY, bits, 0)
    tl.atomic_max(tl.load(row + 8).to(tl.pointer_type(tl.int32)), tl.max(tl.max(bits, axis=1), axis=0))


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
):
    """Write a tile in e4m3, plain and transposed, and the weight's scale and magnitude."""
    x, r, c, inside, row = tile_of(words, tiles, FROM, TILE, COLUMNS)
    bits = tl.maximum(tl.load(tl.load(row + 8).to(tl.pointer_type(tl.int32))), LEAST)
    exponent = ABOVE - ((bits + CARRY) >> 23)
    scale_at = tl.load(row + 7).to(tl.pointer_type(tl.int32))
    tl.store(scale_at, (254 - exponent) << 23)
    tl.store(scale_at + 1, bits)
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scaled = x * (exponent << 23).to(tl.float32, bitcast=True)
    numbers = tl.where(finite, tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), float("nan")).to(tl.float8e4nv)
    plain = tl.load(row + 5).to(tl.pointer_type(tl.float8e4nv))
    other = tl.load(row + 6).to(tl.pointer_type(tl.float8e4nv))
    tl.store(plain + r[:, None] * tl.load(row + 2) + c[None, :], numbers, mask=inside)
    tl.store(other + c[:, None] * tl.load(row + 1) + r[None, :], tl.trans(numbers), mask=tl.trans(inside))


def quantize_many_(weights: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], **constants: int) -> None:
    """Launch two kernels for each type of weights, all on one device; `parts`: those of each weight's buffer."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, weight in enumerate(weights):
        kinds.setdefault(weight.dtype, []).append(i)
    with torch.no_grad(), tables.on(weights[0].device):
        for dtype, chosen in kinds.items():
            _launch(dtype, [weights[i] for i in chosen], [parts[i] for i in chosen], constants)


def _launch(
    dtype: torch.dtype, weights: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], constants: dict[str, int]
) -> None:
    device = weights[0].device
    magnitudes = torch.zeros(len(weights), dtype=torch.int32, device=device)
    rows = [_row(w, p, magnitudes.data_ptr() + 4 * i) for i, (w, p) in enumerate(zip(weights, parts, strict=True))]
    tiles = [(i << 32) + np.arange(_tiles(weight)) for i, weight in enumerate(weights)]
    host = tables.host_words(COLUMNS * len(rows) + sum(map(len, tiles)), device)
    host.numpy()[:] = np.concatenate([*rows, *tiles])
    words = host.to(device, non_blocking=True)
    arguments = words, words[COLUMNS * len(rows) :]
    shared = {"FROM": TYPES[dtype], "TILE": TILE, "COLUMNS": COLUMNS}
    grid = (len(arguments[1]),)
    amp_magnitudes[grid](*arguments, **shared)
    amp_quantize[grid](*arguments, **shared, **constants)


def _tiles(weight: Tensor) -> int:
    return -(-weight.shape[0] // TILE) * -(-weight.shape[1] // TILE)


def _row(weight: Tensor, parts: Sequence[Tensor], magnitude: int) -> list[int]:
    """A weight's words: its address, sizes and strides; the addresses of its parts; that of its magnitude."""
    plain, other, scale = (part.data_ptr() for part in parts[:3])
    return [weight.data_ptr(), *weight.shape, *weight.stride(), plain, other, scale, magnitude]
