"""Sums of rows of logits in one read, gradients written over logits; see `ampcompile.kernels.cross_entropy`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

BLOCK = 4096
"""Logits that a program reads at a time, with `WARPS` warps: 32 bytes of 16-bit numbers a thread."""
WARPS = 8
VECTOR = tl.constexpr(8)
"""16-bit numbers in 16 bytes. Rows of odd width may start unaligned; accesses are aligned from the first multiple."""


@triton.jit
def taken(logits, weight, at, valid, top, total, weighted, WEIGHTED: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Add more logits of a row to its running maximum, sum of exp(logit - maximum) and weighted sum."""
    x = tl.load(logits + at, mask=valid, other=float("-inf")).to(tl.float32)
    higher = tl.maximum(top, tl.max(x))
    below = tl.where(higher == float("-inf"), 0.0, higher)  # else -inf less -inf would be NaN
    total = total * tl.exp(top - below) + tl.sum(tl.exp(x - below))
    if HAS_WEIGHT:
        x *= tl.load(weight + at, mask=valid, other=0.0)
    if WEIGHTED:
        weighted += tl.sum(tl.where(valid, x, 0.0))
    return higher, total, weighted


@triton.jit
def amp_cross_entropy_sums(
    logits, weight, lse, sums, stride, width, WEIGHTED: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum one row per program: logits before the first multiple of 16 bytes, whole blocks, the rest."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * stride
    odd = tl.minimum(tl.cdiv(begin, VECTOR) * VECTOR - begin, width).to(tl.int32)
    few, many = tl.arange(0, VECTOR), tl.arange(0, BLOCK)
    first = begin + odd
    straight = logits + tl.multiple_of(first, VECTOR)
    scale = weight + odd
    top, total, weighted = taken(logits + begin, weight, few, few < odd, float("-inf"), 0.0, 0.0, WEIGHTED, HAS_WEIGHT)
    whole = (width - odd) // BLOCK * BLOCK
    for at in range(0, whole, BLOCK):
        top, total, weighted = taken(
            straight, scale, at + many, at + many >= 0, top, total, weighted, WEIGHTED, HAS_WEIGHT
        )
    at = whole + many
    top, total, weighted = taken(straight, scale, at, at < width - odd, top, total, weighted, WEIGHTED, HAS_WEIGHT)
    tl.store(lse + row, top)
    tl.store(lse + tl.num_programs(0) + row, tl.log(total))
    if WEIGHTED:
        tl.store(sums + row, weighted)


@triton.jit
def gradient_block(
    logits,
    weight,
    at,
    valid,
    target,
    top,
    rest,
    probability,
    hit,
    smoothing,
    SMOOTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Write the gradient of some logits of a row over them."""
    x = tl.load(logits + at, mask=valid, other=0.0).to(tl.float32)
    out = tl.exp(x - top - rest) * probability
    if SMOOTH:
        if HAS_WEIGHT:
            out -= smoothing * tl.load(weight + at, mask=valid, other=0.0)
        else:
            out -= smoothing
    out -= tl.where(at == target, hit, 0.0)
    tl.store(logits + at, out.to(logits.dtype.element_ty), mask=valid)


@triton.jit
def amp_cross_entropy_gradient(
    logits,
    weight,
    target,
    lse,
    lse_stride,
    probability,
    hit,
    smoothing,
    stride,
    width,
    SMOOTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one row per program, in the blocks of `amp_cross_entropy_sums`."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * stride
    odd = tl.minimum(tl.cdiv(begin, VECTOR) * VECTOR - begin, width).to(tl.int32)
    few, many = tl.arange(0, VECTOR), tl.arange(0, BLOCK)
    first = begin + odd
    straight = logits + tl.multiple_of(first, VECTOR)
    scale = weight + odd
    hot = tl.load(target + row)
    top, rest = tl.load(lse + row), tl.load(lse + lse_stride + row)
    p, h, s = tl.load(probability + row), tl.load(hit + row), tl.load(smoothing + row)
    gradient_block(logits + begin, weight, few, few < odd, hot, top, rest, p, h, s, SMOOTH, HAS_WEIGHT)
    whole = (width - odd) // BLOCK * BLOCK
    for at in range(0, whole, BLOCK):
        gradient_block(straight, scale, at + many, at + many >= 0, hot - odd, top, rest, p, h, s, SMOOTH, HAS_WEIGHT)
    at = whole + many
    gradient_block(straight, scale, at, at < width - odd, hot - odd, top, rest, p, h, s, SMOOTH, HAS_WEIGHT)


def block_of(width: int) -> int:
    """The block size for rows of a width, in all kernels of this file."""
    return min(BLOCK, triton.next_power_of_2(width)) if isinstance(width, int) else BLOCK


def row_sums(logits: Tensor, weight: Tensor | None, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of each row in two parts, (2, rows), and its sum weighted by `weight`, in one launch."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, width = logits.shape
    lse = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, dtype=torch.float32, device=logits.device) if weighted else None
    weight = None if weight is None or not weighted else weight.float().contiguous()
    wrap_triton(amp_cross_entropy_sums)[(rows,)](
        logits,
        lse if weight is None else weight,
        lse,
        lse if sums is None else sums,
        logits.stride(0),
        width,
        WEIGHTED=weighted,
        HAS_WEIGHT=weight is not None,
        BLOCK=block_of(width),
        num_warps=WARPS,
    )
    return lse, sums


def gradient_(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    probability: Tensor,
    hit: Tensor,
    smoothing: Tensor | None,
) -> None:
    """Write the gradient of `logits` (rows, classes), whose rows are contiguous, over them, in one launch.

    `lse` (2, rows) may be a slice of a wider tensor.
    """
    rows, width = logits.shape
    amp_cross_entropy_gradient[(rows,)](
        logits,
        lse if weight is None else weight.float().contiguous(),
        target.contiguous(),
        lse,
        lse.stride(0),
        probability.contiguous(),
        hit.contiguous(),
        hit if smoothing is None else smoothing.contiguous(),
        logits.stride(0),
        width,
        SMOOTH=smoothing is not None,
        HAS_WEIGHT=weight is not None,
        BLOCK=block_of(width),
        num_warps=WARPS,
    )
