"""Round many weights into their copies on the GPU; see `ampcompile.kernels.cast_many`."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start, table_by_launches

CHUNK = 8192
BLOCK = 1024
TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def cast_chunk(
    weight_at, copy_at, size, FROM: tl.constexpr, TO: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Round one chunk, given by its addresses; whole and aligned ones 16 bytes at a time."""
    if (size == CHUNK) & (((weight_at | copy_at) & 15) == 0):
        # A hint applies to the operation that makes the pointer, so the branches make separate pointers.
        weight = tl.multiple_of(weight_at.to(tl.pointer_type(FROM)), 16)
        copy = tl.multiple_of(copy_at.to(tl.pointer_type(TO)), 16)
        for i in range(0, CHUNK, BLOCK):
            offset = i + tl.arange(0, BLOCK)
            x = tl.load(weight + offset)
            # Four elements a thread, as in the float32 load: then threads don't exchange elements.
            offset = tl.max_contiguous(tl.multiple_of(offset, 4), 4)
            tl.store(copy + offset, x.to(tl.float32).to(TO))
    else:
        weight = weight_at.to(tl.pointer_type(FROM))
        copy = copy_at.to(tl.pointer_type(TO))
        for i in range(0, CHUNK, BLOCK):
            offset = i + tl.arange(0, BLOCK)
            x = tl.load(weight + offset, mask=offset < size)
            tl.store(copy + offset, x.to(tl.float32).to(TO), mask=offset < size)


@triton.jit
def amp_cast(rows, FROM: tl.constexpr, TO: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Cast one chunk per program; a row holds the addresses of weight and copy and the number of elements."""
    row = rows + 3 * tl.program_id(0)
    cast_chunk(tl.load(row), tl.load(row + 1), tl.load(row + 2), FROM, TO, CHUNK, BLOCK)


@triton.jit
def amp_cast_weights(
    words, FROM: tl.constexpr, TO: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Cast one chunk per program; a row for each of COUNT weights: its address, the copy's, elements, first chunk."""
    chunk = tl.program_id(0)
    firsts = tl.load(words + 4 * tl.arange(0, COUNT) + 3)
    row = words + 4 * (tl.sum((firsts <= chunk).to(tl.int32), axis=0) - 1)
    begin = (chunk - tl.load(row + 3)) * CHUNK
    weight_at = tl.load(row) + begin * (FROM.primitive_bitwidth // 8)
    copy_at = tl.load(row + 1) + begin * (TO.primitive_bitwidth // 8)
    cast_chunk(weight_at, copy_at, tl.minimum(tl.load(row + 2) - begin, CHUNK), FROM, TO, CHUNK, BLOCK)


@functools.cache
def _constants(source: torch.dtype, target: torch.dtype, **more: int) -> Constants:
    return Constants(FROM=TYPES[source], TO=TYPES[target], CHUNK=CHUNK, BLOCK=BLOCK, **more, num_warps=4)


def cast_many_(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Launch one kernel for each pair of dtypes, without a sync."""
    device, pairs = copies[0].device, list(zip(weights, copies, strict=True))
    with tables.on(device):
        cast = _cast_in_capture if tables.capturing(device) else _cast
        for source, target in dict.fromkeys((weight.dtype, copy.dtype) for weight, copy in pairs):
            chosen = [(w, c) for w, c in pairs if (w.dtype, c.dtype) == (source, target)]
            cast([w for w, _ in chosen], [c for _, c in chosen], device)


def _cast(weights: Sequence[Tensor], copies: Sequence[Tensor], device: torch.device) -> None:
    rows = chunk_rows(weights, copies)
    if len(rows):
        host = tables.host_words(rows.size, device)
        host.numpy()[:] = rows.reshape(-1)
        table = host.to(device, non_blocking=True)
        start(amp_cast, len(rows), (table,), (), _constants(weights[0].dtype, copies[0].dtype), device)


def _cast_in_capture(weights: Sequence[Tensor], copies: Sequence[Tensor], device: torch.device) -> None:
    numels = tables.sizes(weights)
    counts = -(-numels // CHUNK)
    total, room = int(counts.sum()), triton.next_power_of_2(len(numels))
    words = np.full((room, 4), total)  # no chunk is at or behind those that stand for no weight
    words[: len(numels)] = np.stack([*tables.addresses(weights, copies), numels, np.cumsum(counts) - counts], axis=1)
    if total:
        table = table_by_launches(words.reshape(-1), device)
        constants = _constants(weights[0].dtype, copies[0].dtype, COUNT=room)
        start(amp_cast_weights, total, (table,), (), constants, device)


def chunk_rows(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> np.ndarray:
    """int64 [chunks, 3]: the addresses of each chunk in weight and copy, and its size."""
    numels = tables.sizes(weights)
    counts = -(-numels // CHUNK)
    tensor = np.repeat(np.arange(len(numels)), counts)
    begin = (np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK
    of_weights, of_copies = tables.addresses(weights, copies)
    columns = [
        of_weights[tensor] + begin * weights[0].element_size(),
        of_copies[tensor] + begin * copies[0].element_size(),
        np.minimum(numels[tensor] - begin, CHUNK),
    ]
    return np.stack(columns, axis=1)
