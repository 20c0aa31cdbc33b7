"""Round many weights into their copies on the GPU; see `ampcompile.kernels.cast_many`."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start, table_on

CHUNK = 8192
BLOCK = 1024
FEWEST = 128  # weights that a kernel has room for: one a thread; another kernel is compiled for each double
TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["count"])
def amp_cast(
    words, count, FROM: tl.constexpr, TO: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr
):
    """Round one chunk of a weight into its copy per program, whole and aligned chunks 16 bytes at a time.

    words, for each of `count` weights, at most ROOM: the first of its chunks, its address, the copy's, its elements.
    """
    chunk = tl.program_id(0)
    weights = tl.arange(0, ROOM)
    before = (tl.load(words + weights, mask=weights < count) <= chunk) & (weights < count)
    column = words + tl.sum(before.to(tl.int32), axis=0) - 1
    begin = (chunk - tl.load(column)) * CHUNK
    weight_at = tl.load(column + count) + begin * (FROM.primitive_bitwidth // 8)
    copy_at = tl.load(column + 2 * count) + begin * (TO.primitive_bitwidth // 8)
    size = tl.minimum(tl.load(column + 3 * count) - begin, CHUNK)
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


@functools.cache
def _constants(source: torch.dtype, target: torch.dtype, **sizes: int) -> Constants:
    return Constants(FROM=TYPES[source], TO=TYPES[target], **sizes, num_warps=4, enable_fp_fusion=True)


def cast_many_(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Launch one kernel for each pair of dtypes, without a sync."""
    device, pairs = copies[0].device, list(zip(weights, copies, strict=True))
    with tables.on(device):
        for source, target in dict.fromkeys((weight.dtype, copy.dtype) for weight, copy in pairs):
            chosen = [(w, c) for w, c in pairs if (w.dtype, c.dtype) == (source, target)]
            numels = tables.sizes([w for w, _ in chosen])
            counts = -(-numels // CHUNK)
            if programs := int(counts.sum()):
                columns = tables.addresses(*zip(*chosen, strict=True))
                words = table_on(device, np.concatenate([np.cumsum(counts) - counts, *columns, numels]))
                room = triton.next_power_of_2(max(len(chosen), FEWEST))
                constants = _constants(source, target, CHUNK=CHUNK, BLOCK=BLOCK, ROOM=room)
                start(amp_cast, programs, (words,), (len(chosen),), constants, device)
