"""Copies of weights compared with the weights by samples, and cast again, on the GPU; see `kernels.recheck`."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .cast_many import BLOCK, TYPES, cast_chunk, rounded, row_tables


@triton.jit
def recheck_kernel(
    rows,
    changed,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    REWRITE: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk a program, rows as in `cast_kernel`: four runs of elements, rounded, are compared with the copy."""
    row = rows + 3 * tl.program_id(0)
    weight_at = tl.load(row)
    copy_at = tl.load(row + 1)
    size = tl.load(row + 2)
    weight = weight_at.to(tl.pointer_type(FROM))
    copy = copy_at.to(tl.pointer_type(TO))
    lane = tl.arange(0, SAMPLE)
    RUN: tl.constexpr = SAMPLE // 4
    spread = lane // RUN * (size - RUN) // 3 + lane % RUN
    offset = tl.where(size <= SAMPLE, lane, spread)
    expected = rounded(tl.load(weight + offset, mask=offset < size, other=0.0), TO).to(tl.int16, bitcast=True)
    held = tl.load(copy + offset, mask=offset < size, other=0.0).to(tl.int16, bitcast=True)
    INFINITY: tl.constexpr = 0x7F80 if tl.bfloat16 == TO else 0x7C00
    both_nan = ((expected & 0x7FFF) > INFINITY) & ((held & 0x7FFF) > INFINITY)
    if tl.max(((expected != held) & ~both_nan).to(tl.int32), 0) != 0:
        tl.store(changed, 1)
        if REWRITE:
            cast_chunk(weight_at, copy_at, size, FROM, TO, CHUNK, BLOCK)


def recheck_(
    copies: Sequence[Tensor],
    weights: Sequence[Tensor],
    changed: Tensor,
    rewrite: bool,
    workspace: dict[str, Any],
    chunk: int,
    sample: int,
) -> None:
    """One launch for each pair of dtypes."""
    with tables.on(changed.device):
        if "rows" not in workspace:
            workspace["rows"] = list(row_tables(copies, weights, chunk))
        for rows, source, target in workspace["rows"]:
            recheck_kernel[(len(rows),)](
                rows,
                changed,
                FROM=TYPES[source],
                TO=TYPES[target],
                REWRITE=rewrite,
                SAMPLE=sample,
                CHUNK=chunk,
                BLOCK=BLOCK,
                num_warps=4,
            )
