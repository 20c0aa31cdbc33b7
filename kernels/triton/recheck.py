"""Compare copies of weights with samples of the weights, and cast again, on the GPU; see `kernels.recheck`."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .cast_many import BLOCK, TYPES, cast_chunk, rounded, row_tables

ROWS = 8
"""Chunks that a program compares at once: a program of fewer would finish before the next one starts."""


@triton.jit(do_not_specialize=["count", "mark"])
def amp_recheck(
    rows,
    count,
    changed,
    mark,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    REWRITE: tl.constexpr,
    ROWS: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare four runs of each of `ROWS` chunks per program, rounded, with the copy; rows as in `amp_cast`."""
    first = tl.program_id(0) * ROWS
    chunk = tl.arange(0, ROWS)
    row = rows + 3 * (first + chunk)
    valid = first + chunk < count
    weight = tl.load(row, mask=valid, other=0).to(tl.pointer_type(FROM))[:, None]
    copy = tl.load(row + 1, mask=valid, other=0).to(tl.pointer_type(TO))[:, None]
    size = tl.load(row + 2, mask=valid, other=0).to(tl.int32)[:, None]
    lane = tl.arange(0, SAMPLE)[None, :]
    RUN: tl.constexpr = SAMPLE // 4
    spread = lane // RUN * (size - RUN) // 3 + lane % RUN
    offset = tl.where(size <= SAMPLE, lane, spread)
    expected = rounded(tl.load(weight + offset, mask=offset < size, other=0.0), TO).to(tl.int16, bitcast=True)
    held = tl.load(copy + offset, mask=offset < size, other=0.0).to(tl.int16, bitcast=True)
    INFINITY: tl.constexpr = 0x7F80 if tl.bfloat16 == TO else 0x7C00
    both_nan = ((expected & 0x7FFF) > INFINITY) & ((held & 0x7FFF) > INFINITY)
    differs = tl.max(((expected != held) & ~both_nan).to(tl.int32), 1)
    if tl.max(differs, 0) != 0:
        tl.atomic_max(changed, mark)
        if REWRITE:
            for i in range(0, ROWS):
                if tl.max(tl.where(chunk == i, differs, 0), 0) != 0:
                    at = rows + 3 * (first + i)
                    cast_chunk(tl.load(at), tl.load(at + 1), tl.load(at + 2), FROM, TO, CHUNK, BLOCK)


def recheck_(
    copies: Sequence[Tensor],
    weights: Sequence[Tensor],
    changed: Tensor,
    mark: int,
    rewrite: bool,
    workspace: dict[int, Any],
    known: dict[Any, Any],
    chunk: int,
    sample: int,
) -> None:
    """Launch one kernel for each pair of dtypes; `known` caches row tables."""
    with tables.on(changed.device):
        if (stream := tables.stream(changed.device)) not in workspace:
            workspace[stream] = row_tables(copies, weights, chunk, known)
        for rows, source, target in workspace[stream]:
            amp_recheck[(triton.cdiv(len(rows), ROWS),)](
                rows,
                len(rows),
                changed,
                mark,
                FROM=TYPES[source],
                TO=TYPES[target],
                REWRITE=rewrite,
                ROWS=ROWS,
                SAMPLE=sample,
                CHUNK=chunk,
                BLOCK=BLOCK,
                num_warps=4,
            )
