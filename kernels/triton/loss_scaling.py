"""Loss scaling on the GPU; see `check_grads`, `unscale` and `update_scale` of `ampcompile.kernels`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start
from .step import TYPES

BLOCK = 1024
PROGRAMS_PER_PROCESSOR = 4
_UPDATING = Constants(num_warps=1, enable_fp_fusion=True)


@triton.jit
def inverse_of(scale, HAS_SCALE: tl.constexpr):
    """1 / scale, rounded as torch rounds it."""
    inverse = tl.full([], 1.0, tl.float32)
    if HAS_SCALE:
        inverse = (1.0 / tl.load(scale).to(tl.float64)).to(tl.float32)
    return inverse


@triton.jit(do_not_specialize=["chunk_count", "tensor_count", "first_program", "all_programs"])
def amp_check_grads(
    words,
    chunks,
    scale,
    multiplier,
    sums,
    flags,
    counter,
    result,
    chunk_count,
    tensor_count,
    max_norm,
    first_program,
    all_programs,
    GRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_MAX_NORM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Check chunks, which programs take in turn; the last program to finish, of all launches, adds up the results.

    words: sizes and addresses of the gradients.
    """
    factor = inverse_of(scale, HAS_SCALE)
    if HAS_MULTIPLIER:
        factor *= tl.load(multiplier)
    total = tl.zeros([BLOCK], tl.float64)
    plain = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    number = tl.program_id(0)
    while number < chunk_count:
        tensor = tl.load(chunks + 2 * number)
        size = tl.load(words + tensor)
        address = tl.load(words + tensor_count + tensor)
        begin = tl.load(chunks + 2 * number + 1).to(tl.int64) * CHUNK
        part = tl.zeros([BLOCK], tl.float32)
        if (begin + CHUNK <= size) & ((address & 15) == 0):
            grad = tl.multiple_of(address.to(tl.pointer_type(GRAD)), 16)
            for i in range(0, CHUNK, BLOCK):
                offset = begin + i + tl.arange(0, BLOCK)
                x = tl.load(grad + offset).to(tl.float32) * factor
                bad |= (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
                part += x * x
                plain += x
        else:
            grad = address.to(tl.pointer_type(GRAD))
            for i in range(0, CHUNK, BLOCK):
                offset = begin + i + tl.arange(0, BLOCK)
                x = tl.load(grad + offset, mask=offset < size, other=0.0).to(tl.float32)
                x = tl.where(offset < size, x * factor, 0.0)  # padding times an infinite factor would be NaN
                bad |= (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
                part += x * x
                plain += x
        total += part.to(tl.float64)
        number += tl.num_programs(0)
    program = first_program + tl.program_id(0)
    tl.store(sums + program, tl.sum(total, 0))
    digest = tl.sum(plain.to(tl.float64) * (tl.arange(0, BLOCK) + 1), 0)
    tl.store(sums + all_programs + program, digest * (program + 1))
    tl.store(flags + program, tl.max(bad, 0))
    tl.debug_barrier()
    finished = tl.atomic_add(counter, 1, sem="acq_rel")
    if finished == all_programs - 1:
        programs = tl.arange(0, PARTS)
        valid = programs < all_programs
        sum_all = tl.sum(tl.load(sums + programs, mask=valid, other=0.0, volatile=True), 0)
        digest_all = tl.sum(tl.load(sums + all_programs + programs, mask=valid, other=0.0, volatile=True), 0)
        bad_all = tl.max(tl.load(flags + programs, mask=valid, other=0, volatile=True), 0)
        norm = tl.sqrt(sum_all).to(tl.float32)
        if HAS_MAX_NORM:
            shrink = max_norm / (norm.to(tl.float64) + 1e-6)
            factor = factor * tl.where(shrink > 1.0, 1.0, shrink).to(tl.float32)  # NaN stays NaN
        tl.store(result, ((bad_all != 0) | (inverse_of(scale, HAS_SCALE) == 0.0)).to(tl.float32))
        tl.store(result + 1, factor)
        tl.store(result + 2, norm)
        tl.store(result + 3, digest_all.to(tl.float32))
        tl.store(counter, 0)


@functools.cache
def _constants(grad: torch.dtype, **more: int) -> Constants:
    return Constants(GRAD=TYPES[grad], **more, num_warps=4, enable_fp_fusion=True)


def check_grads(
    grads: tables.GradTable,
    scale: Tensor | None,
    multiplier: Tensor | None,
    max_norm: float | None,
    workspace: dict[Any, Any],
) -> tuple[Tensor, ...]:
    """Return found_inf, multiplier, norm and digest; one launch for each type of gradient."""
    device = grads.device
    with tables.on(device):
        words, launches = tables.grad_launches(grads, "check", workspace)
        counts = [max(1, min(pieces.shape[0], most_programs(device))) for _, pieces in launches]
        programs = sum(counts)
        # Removed while in use, so that buffers with the partial counts of an interrupted check are never used again.
        partial = None if tables.capturing(device) else workspace.pop("partial results", None)
        if partial is None or partial[1].shape[0] < programs:
            sums = torch.empty(2 * programs, dtype=torch.float64, device=device)
            flags = torch.empty(programs, dtype=torch.int32, device=device)
            # And the count of finished programs, which the kernel resets to zero.
            partial = sums, flags, torch.zeros((), dtype=torch.int32, device=device)
        result = torch.empty(4, dtype=torch.float32, device=device)
        factors = result if scale is None else scale, result if multiplier is None else multiplier
        limit, first = 0.0 if max_norm is None else float(max_norm), 0
        given: dict[str, int] = {"HAS_SCALE": scale is not None, "HAS_MULTIPLIER": multiplier is not None}
        given |= {"HAS_MAX_NORM": max_norm is not None, "CHUNK": tables.CHUNK, "BLOCK": BLOCK}
        for (dtype, pieces), count in zip(launches, counts, strict=True):
            start(
                amp_check_grads,
                count,
                (words, pieces, *factors, *partial, result),
                (pieces.shape[0], len(grads.numels), limit, first, programs),
                _constants(dtype, **given, PARTS=triton.next_power_of_2(programs)),
                device,
            )
            first += count
        if not tables.capturing(device):  # a CUDA graph has buffers of its own, in its own memory pool
            workspace["partial results"] = partial
    return result.unbind()


@functools.cache
def most_programs(device: torch.device) -> int:
    """The number of programs that the device runs at once; fixed, because it determines the order of the sum."""
    if device.type != "cuda":
        return PROGRAMS_PER_PROCESSOR
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


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
                    _constants(dtype, CHUNK=tables.CHUNK, BLOCK=BLOCK),
                    grads.device,
                )


@triton.jit
def float64_of(bits):
    """A float64 from its 64 bits: Triton passes Python's floats as float32."""
    return tl.cast(tl.cast(bits, tl.int64), tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["growth", "backoff", "interval", "low", "high"])
def amp_update_scale(scale, growth_tracker, skips, found_inf, growth, backoff, interval, low, high):
    """Update scale and counters in one program; arithmetic in float64, results in float32, as in torch."""
    old = tl.load(scale).to(tl.float64)
    tracker = tl.load(growth_tracker) + 1
    overflow = tl.load(found_inf) != 0.0
    due = tracker == tl.cast(interval, tl.int32)
    grown = (old * float64_of(growth)).to(tl.float32)
    grown = tl.where(tl.abs(grown) < float("inf"), grown, old.to(tl.float32))
    shrunk = (old * float64_of(backoff)).to(tl.float32)
    new = tl.where(overflow, shrunk, tl.where(due, grown, old.to(tl.float32)))
    lowest, highest = float64_of(low).to(tl.float32), float64_of(high).to(tl.float32)
    new = tl.where(new < lowest, lowest, tl.where(new > highest, highest, new))  # NaN stays NaN
    tl.store(scale, new)
    tl.store(growth_tracker, tl.where(overflow | due, 0, tracker))
    tl.store(skips, tl.where(overflow, tl.load(skips) + 1, 0))


def update_scale_(
    scale: Tensor, growth_tracker: Tensor, skips: Tensor, found_infs: Sequence[Tensor], *settings: float
) -> None:
    """Launch one kernel; several flags are first combined by torch."""
    found_inf = found_infs[0]
    if len(found_infs) > 1:
        found_inf = torch.stack([flag.reshape(()) for flag in found_infs]).ne(0).any().float()
    growth, backoff, interval, low, high = settings
    growth, backoff, low, high = tables.float_bits(np.array([growth, backoff, low, high])).tolist()
    with tables.on(scale.device):
        start(
            amp_update_scale,
            1,
            (scale, growth_tracker, skips, found_inf),
            (growth, backoff, interval, low, high),
            _UPDATING,
            scale.device,
        )
