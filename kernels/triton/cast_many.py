"""Round many weights into their copies on the GPU; see `ampcompile.kernels.cast_many`."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


MOST_TABLES = 4
"""Row tables kept: for all weights, for those written alone, or without copies that a pending backward keeps."""


class RowTable(NamedTuple):
    """Addresses and sizes, int64 [chunks, 3] on the device, see `amp_cast`; the types of weights and copies."""

    rows: Tensor
    source: torch.dtype
    target: torch.dtype


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


def cast_many_(copies: Sequence[Tensor], weights: Sequence[Tensor], known: dict[Any, Any]) -> None:
    """Launch one kernel for each pair of dtypes; `known` caches row tables, but not in captures."""
    device = copies[0].device
    with tables.on(device):
        if tables.capturing(device):
            for source, target, chosen in _by_dtypes(list(zip(weights, copies, strict=True))):
                _cast_in_capture(chosen, source, target, device)
            return
        for rows, source, target in row_tables(copies, weights, CHUNK, known):
            start(amp_cast, len(rows), (rows,), (), _constants(source, target), rows.device)


def _cast_in_capture(
    pairs: Sequence[tuple[Tensor, Tensor]], source: torch.dtype, target: torch.dtype, device: torch.device
) -> None:
    weights, copies = [w for w, _ in pairs], [c for _, c in pairs]
    numels = tables.sizes(weights)
    counts = -(-numels // CHUNK)
    total, room = int(counts.sum()), triton.next_power_of_2(len(numels))
    words = np.full((room, 4), total)  # no chunk is at or behind those that stand for no weight
    words[: len(numels)] = np.stack([*tables.addresses(weights, copies), numels, np.cumsum(counts) - counts], axis=1)
    if total:
        table = table_by_launches(words.reshape(-1), device)
        start(amp_cast_weights, total, (table,), (), _constants(source, target, COUNT=room), device)


def _by_dtypes(
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> Iterator[tuple[torch.dtype, torch.dtype, list[tuple[Tensor, Tensor]]]]:
    for source, target in dict.fromkeys((weight.dtype, copy.dtype) for weight, copy in pairs):
        yield source, target, [(w, c) for w, c in pairs if (w.dtype, c.dtype) == (source, target)]


def row_tables(
    copies: Sequence[Tensor], weights: Sequence[Tensor], chunk: int, known: dict[Any, Any]
) -> list[RowTable]:
    """The table on the device for each pair of dtypes, for use on the current stream; `known` keeps the latest.

    A caller that switches streams must wait for the earlier stream first: the table's copy may not have finished.
    """
    pairs = list(zip(weights, copies, strict=True))
    key = (chunk, *((w.data_ptr(), c.data_ptr(), w.numel(), w.dtype, c.dtype) for w, c in pairs))
    device_tables = known[key] = known.pop(key) if key in known else list(_row_tables(pairs, chunk))
    while len(known) > MOST_TABLES:
        del known[next(iter(known))]
    for table in device_tables:
        tables.keep_for_stream(table.rows)
    return device_tables


def _row_tables(pairs: Sequence[tuple[Tensor, Tensor]], chunk: int) -> Iterator[RowTable]:
    """Build the tables and copy them to the device, without a sync."""
    device = pairs[0][0].device
    for source, target, chosen in _by_dtypes(pairs):
        rows = chunk_rows([w for w, _ in chosen], [c for _, c in chosen], chunk)
        if len(rows):
            host = tables.host_words(rows.size, device)
            host.numpy()[:] = rows.reshape(-1)
            yield RowTable(host.to(device, non_blocking=True).view(-1, 3), source, target)


def chunk_rows(weights: Sequence[Tensor], copies: Sequence[Tensor], chunk: int) -> np.ndarray:
    """int64 [chunks, 3]: the addresses of each chunk in weight and copy, and its size."""
    numels = tables.sizes(weights)
    counts = -(-numels // chunk)
    tensor = np.repeat(np.arange(len(numels)), counts)
    begin = (np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
    of_weights, of_copies = tables.addresses(weights, copies)
    columns = [
        of_weights[tensor] + begin * weights[0].element_size(),
        of_copies[tensor] + begin * copies[0].element_size(),
        np.minimum(numels[tensor] - begin, chunk),
    ]
    return np.stack(columns, axis=1)
