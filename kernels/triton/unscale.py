"""Multiply gradients in place on the GPU; see `ampcompile.kernels.unscale`."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start
from .step import TYPES

BLOCK = 1024


@triton.jit
def scale_block(grad, offset, mask, factor, GRAD: tl.constexpr):
    """Multiply a block in place; return 1 for each element that isn't finite afterwards."""
    x = tl.load(grad + offset, mask=mask)
    product = (x.to(tl.float32) * factor).to(GRAD)
    if factor != 1.0:  # else the bits stay, NaN payloads included
        tl.store(grad + offset, product, mask=mask)
    finite = tl.abs(product.to(tl.float32)) < float("inf")
    return finite.to(tl.int32) ^ 1


@triton.jit(do_not_specialize=["tensor_count"])
def amp_unscale(
    words, chunks, multiplier, found_inf, tensor_count, GRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply one chunk of a tensor per program; words: sizes, then addresses. All programs write the same flag 1."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(words + tensor)
    address = tl.load(words + tensor_count + tensor)
    grad = address.to(tl.pointer_type(GRAD))
    factor = tl.load(multiplier)
    bad = tl.zeros([BLOCK], tl.int32)
    if (begin + CHUNK <= size) & ((address & 15) == 0):
        for i in range(0, CHUNK, BLOCK):
            bad |= scale_block(tl.multiple_of(grad, 16), begin + i + tl.arange(0, BLOCK), None, factor, GRAD)
    else:
        for i in range(0, CHUNK, BLOCK):
            offset = begin + i + tl.arange(0, BLOCK)
            not_finite = scale_block(grad, offset, offset < size, factor, GRAD)
            bad |= tl.where(offset < size, not_finite, 0)
    tl.store(found_inf, 1.0, mask=(tl.max(bad, 0) != 0) | (factor == 0.0))


@functools.cache
def _constants(grad: torch.dtype) -> Constants:
    return Constants(GRAD=TYPES[grad], CHUNK=tables.CHUNK, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True)


def unscale_(grads: tables.GradTable, multiplier: Tensor, found_inf: Tensor, workspace: dict[Any, Any]) -> None:
    """Launch one kernel for each type of gradient."""
    with tables.on(grads.device):
        words, launches = tables.grad_launches(grads, "unscale", workspace)
        for dtype, pieces in launches:
            if pieces.shape[0]:
                start(
                    amp_unscale,
                    pieces.shape[0],
                    (words, pieces, multiplier, found_inf),
                    (len(grads.numels),),
                    _constants(dtype),
                    grads.device,
                )
