"""Quantize many weights to e4m3 on the GPU; see `ampcompile.kernels.fp8`.

A kernel for the magnitudes, and one that quantizes. Updates do half of the work themselves: they take the magnitudes,
and write the plain matrix by the former scale. If the new scale, a power of two, is the same, only the transposed
matrix is left to write.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .cast_many import TYPES
from .launching import Constants, start, table_on

TILE = 64  # rows and columns of a program's tile: lines of 64 bytes are written both plain and transposed
COLUMNS = 9  # words for each weight, see `kinds_of`
NOTES = 8
"""The column of the address of a weight's notes, two int32: the bits of its largest magnitude so far, and those of the
scale by which the plain matrix is written; 0 if it isn't. By rows, a magnitude for each row, then for each column."""
LEAST = tl.constexpr(tables.LEAST_BITS)
CARRY_ABOVE_1_75 = tl.constexpr(tables.CARRY_ABOVE_1_75)
EXPONENT_SUM = tl.constexpr(tables.EXPONENT_SUM)
INFINITY = tl.constexpr(0x7F7F8000)  # the first number that bfloat16 rounds to infinity
LARGEST = tl.constexpr(448.0)


@triton.jit
def magnitudes_of(x):
    """int32: float32 magnitudes as integers, which compare alike; 0 for those that aren't finite."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < INFINITY, bits, 0)


@triton.jit
def fitted(x, factor):
    """Float32 numbers times a factor in e4m3: NaN if they aren't finite, saturated if too large."""
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    return tl.where(finite, tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST), float("nan")).to(tl.float8e4nv)


@triton.jit
def sizes_of(row):
    """A weight's rows and columns, multiples of 16 as of all that is quantized: so 16 bytes are moved at a time."""
    return tl.multiple_of(tl.load(row + 1), 16), tl.multiple_of(tl.load(row + 2), 16)


@triton.jit
def matrix_at(row, column: tl.constexpr):
    """The address of one of a weight's matrices in e4m3."""
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(tl.float8e4nv)), 16)


@triton.jit
def tile_at(words, tiles, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """The words of the program's weight; its tile's rows and columns, and which of both are inside."""
    row = words + COLUMNS * tl.load(tiles + 2 * tl.program_id(0))
    number = tl.load(tiles + 2 * tl.program_id(0) + 1)
    height, width = sizes_of(row)
    across = (width + TILE - 1) // TILE
    r = (number // across) * TILE + tl.arange(0, TILE)
    c = (number % across) * TILE + tl.arange(0, TILE)
    return row, r, c, (r < height)[:, None] & (c < width)[None, :]


@triton.jit
def read_tile(row, r, c, inside, FROM: tl.constexpr):
    """A tile of a weight in float32."""
    at = tl.load(row).to(tl.pointer_type(FROM)) + r[:, None] * tl.load(row + 3) + c[None, :] * tl.load(row + 4)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def amp_magnitudes(words, tiles, FROM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BY_ROWS: tl.constexpr):
    """Raise a weight's magnitudes to the largest finite ones of a tile."""
    row, r, c, inside = tile_at(words, tiles, TILE, COLUMNS)
    bits = magnitudes_of(read_tile(row, r, c, inside, FROM))
    notes = tl.load(row + 8).to(tl.pointer_type(tl.int32))
    if BY_ROWS:
        height, width = sizes_of(row)
        tl.atomic_max(notes + r, tl.max(bits, axis=1), mask=r < height)
        tl.atomic_max(notes + height + c, tl.max(bits, axis=0), mask=c < width)
    else:
        tl.atomic_max(notes, tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit
def write_scales(row, at, of, inside):
    """Write the scales at some indices of `of`, and magnitudes behind; returns the biased exponents of the factors."""
    bits = tl.maximum(tl.load(tl.load(row + 8).to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0), LEAST)
    exponent = EXPONENT_SUM - ((bits + CARRY_ABOVE_1_75) >> 23)
    scales = tl.load(row + 7).to(tl.pointer_type(tl.int32))
    tl.store(scales + at, (254 - exponent) << 23, mask=inside)
    tl.store(scales + of + at, bits, mask=inside)
    return exponent


@triton.jit
def amp_quantize(words, tiles, FROM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BY_ROWS: tl.constexpr):
    """Write a tile in e4m3, transposed, and plain unless it is there; and its weight's scales and magnitudes."""
    row, r, c, inside = tile_at(words, tiles, TILE, COLUMNS)
    height, width = sizes_of(row)
    plain = matrix_at(row, 5) + r[:, None] * width + c[None, :]
    other = matrix_at(row, 6) + c[:, None] * height + r[None, :]
    if BY_ROWS:
        x = read_tile(row, r, c, inside, FROM)
        of_columns = write_scales(row, height + c, height + width, c < width) << 23
        of_rows = write_scales(row, r, height + width, r < height) << 23
        tl.store(plain, fitted(x, of_rows.to(tl.float32, bitcast=True)[:, None]), mask=inside)
        numbers = tl.trans(fitted(x, of_columns.to(tl.float32, bitcast=True)[None, :]))
    else:
        exponent = write_scales(row, 0, 1, True)
        if tl.load(tl.load(row + 8).to(tl.pointer_type(tl.int32)) + 1) != (254 - exponent) << 23:
            factor = (exponent << 23).to(tl.float32, bitcast=True)
            tl.store(plain, fitted(read_tile(row, r, c, inside, FROM), factor), mask=inside)
        # Through memory: where pairs leave the branch in registers, ptxas 12.8.93, of Triton 3.6 and 3.7, loses half
        # of them, though the PTX is right. The barrier is for other warps.
        tl.debug_barrier()
        numbers = tl.load(matrix_at(row, 5) + r[None, :] * width + c[:, None], mask=tl.trans(inside))
    tl.store(other, numbers, mask=tl.trans(inside))


def quantize_many_(weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Launch two kernels for each type of weights and kind of scales, in captures for each weight, on one device."""
    device = weights[0].device
    kinds = kinds_of(dict(enumerate(zip(buffers, weights, strict=True))))
    with torch.no_grad(), tables.on(device):
        notes = torch.zeros(sum(int(kind.notes.sum()) for kind in kinds), dtype=torch.int64, device=device)
        at = notes.data_ptr()
        for kind in kinds:
            words = table_on(device, _with_notes(kind, at + 8 * (np.cumsum(kind.notes) - kind.notes)))
            at += 8 * int(kind.notes.sum())
            if tables.capturing(device):
                _quantize_in_capture(kind, words, device)
                continue
            workspace = dict[Any, Any]()
            for kernel in (amp_magnitudes, amp_quantize):
                _start(kernel, kind, words, workspace)


def _quantize_in_capture(kind: tables.QuantizedKind, words: Tensor, device: torch.device) -> None:
    tiles = (torch.arange(int(kind.tiles.max()), device=device) << 32).view(torch.int32)  # those of the first weight
    for kernel in (amp_magnitudes, amp_quantize):
        for i, count in enumerate(kind.tiles.tolist()):
            start(kernel, count, (words[COLUMNS * i :], tiles), (), _constants(kind.dtype, kind.by_rows), device)


def take(table: tables.StepTable, quantized: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Let the step quantize these weights, by their indices, each into the buffer before it, and no others."""
    places = {i: buffer.data_ptr() for i, (buffer, _) in quantized.items()}
    if places != table.buffers:
        row = table.addresses[tables.BUFFERS_ROW]
        row[:] = 0
        row[list(places)] = list(places.values())
        table.buffers, table.quantized = places, kinds_of(quantized)


def finish(table: tables.StepTable, words: Tensor, workspace: dict[Any, Any]) -> None:
    """Launch the rest of quantizing after the updates, which left notes in `words`, those of `tables.step_words`."""
    notes = words.data_ptr() + 8 * tables.notes_at(table)
    for kind in table.quantized:
        known = workspace.setdefault(f"quantized {kind.dtype}", tables.DeviceTable())
        rows = _with_notes(kind, notes + 8 * kind.chosen)
        _start(amp_quantize, kind, known.upload(rows, words.device), workspace)


def kinds_of(quantized: Mapping[int, tuple[Tensor, Tensor]]) -> list[tables.QuantizedKind]:
    """Group weights, by their indices and with their buffers, by their types and kinds of scales.

    A weight's words: its address, sizes and strides; the addresses of the two matrices, the scales and the notes.
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, (buffer, weight) in quantized.items():
        by_rows = buffer.numel() != 2 * weight.numel() + tables.SCALE_BYTES
        groups.setdefault((weight.dtype, by_rows), []).append(i)
    kinds = []
    for (dtype, by_rows), chosen in groups.items():
        pairs = [quantized[i] for i in chosen]
        rows = [
            [w.data_ptr(), *w.shape, *w.stride(), *(b.data_ptr() + part * w.numel() for part in range(3)), 0]
            for b, w in pairs
        ]
        tiles = [-(-w.shape[0] // TILE) * -(-w.shape[1] // TILE) for _, w in pairs]
        notes = [sum(w.shape) // 2 if by_rows else 1 for _, w in pairs]
        columns = map(np.array, (chosen, rows, tiles, range(len(pairs)), notes))
        kinds.append(tables.QuantizedKind(dtype, by_rows, *columns))
    return kinds


def _with_notes(kind: tables.QuantizedKind, addresses: np.ndarray) -> np.ndarray:
    """A kind's words, given the addresses of its weights' notes."""
    kind.rows[:, NOTES] = addresses
    return kind.rows.reshape(-1)


def _start(kernel: Any, kind: tables.QuantizedKind, words: Tensor, workspace: dict[Any, Any]) -> None:
    tiles = tables.chunks(tables.CHUNK * kind.tiles, kind.order, words.device, workspace)
    start(kernel, len(tiles), (words, tiles), (), _constants(kind.dtype, kind.by_rows), words.device)


@functools.cache
def _constants(dtype: torch.dtype, by_rows: bool) -> Constants:
    return Constants(FROM=TYPES[dtype], TILE=TILE, COLUMNS=COLUMNS, BY_ROWS=by_rows, num_warps=4, enable_fp_fusion=True)
