"""Shared code of the optimizers' steps: reading and writing weights, and launching the kernels."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start
from .quantize_many import finish, fitted, magnitudes_of

BLOCK = 512  # with 4 warps: 4 elements of each tensor a thread, one 16-byte access
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
TYPES |= {torch.int16: tl.int16, torch.int64: tl.int64, torch.int8: tl.int8}
NO_COPY = tl.float32
SPAN = tl.constexpr(tables.SPAN)


@triton.jit
def refresh(copy, offset, weight, mask, COPY: tl.constexpr):
    """Round weights into their copy, if any: address 0 means no copy, a COPY of float32 no copies at all."""
    if COPY.primitive_bitwidth == 32:
        return
    if copy.to(tl.int64) != 0:
        tl.store(copy + offset, weight.to(COPY), mask=mask)


@triton.jit
def factor_of(quantized, size):
    """The inverse of a quantized weight's scale; 1 without one: at address 0, or if the type isn't of 8 bits."""
    factor = tl.full([], 1.0, tl.float32)
    if quantized.dtype.element_ty.primitive_bitwidth == 8 and quantized.to(tl.int64) != 0:
        bits = tl.load(scale_of(quantized, size))  # of a power of two
        factor = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def scale_of(quantized, size):
    """The address of a quantized weight's scale, as of an int32."""
    return (quantized + 2 * size).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def quantize(quantized, factor, offset, weight, mask):
    """Write a block of weights times a factor where it is quantized, if it is; returns `magnitudes_of` it, or 0."""
    bits = tl.zeros([weight.shape[0]], tl.int32)
    if quantized.dtype.element_ty.primitive_bitwidth == 8 and quantized.to(tl.int64) != 0:
        tl.store(quantized + offset, fitted(weight, factor), mask=mask)
        bits = magnitudes_of(weight)
        if mask is not None:
            bits = tl.where(mask, bits, 0)
    return bits


@triton.jit
def note(notes, quantized, size, bits):
    """Note the largest magnitude of a chunk, and the scale by which it is quantized; see `quantize_many.NOTES`."""
    if quantized.dtype.element_ty.primitive_bitwidth == 8 and quantized.to(tl.int64) != 0:
        pair = notes.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(pair, tl.max(bits, axis=0))
        tl.store(pair + 1, tl.load(scale_of(quantized, size)))


@triton.jit
def refresh_chunk(weights, begin, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the copies of a chunk of weights that stay as they are; returns the largest results of `quantize`."""
    param, beside, _checksums, quantized, factor = weights
    is_wide: tl.constexpr = param.dtype.element_ty.primitive_bitwidth == 32
    has_copy: tl.constexpr = is_wide and beside.dtype.element_ty.primitive_bitwidth == 16
    largest = tl.zeros([BLOCK], tl.int32)
    if has_copy or quantized.dtype.element_ty.primitive_bitwidth == 8:
        for i in range(0, CHUNK, BLOCK):
            offset = begin + i + tl.arange(0, BLOCK)
            weight = tl.load(param + offset, mask=offset < size).to(tl.float32)
            if has_copy:
                refresh(beside, offset, weight, offset < size, beside.dtype.element_ty)
            largest = tl.maximum(largest, quantize(quantized, factor, offset, weight, offset < size))
    return largest


@triton.jit
def read_weights(weights, at, mask):
    """The float32 values of a block of weights: parameters, what is beside them (a copy, or what
    `ampcompile.kernels.masters` keeps), checksums, what they are quantized to, and by which factor.

    `at`: their indices, see `states.place_of`; their offsets; and these for tensors of 16 bits.
    """
    param, beside, checksums, _quantized, _factor = weights
    index, offset, offset4 = at
    if param.dtype.element_ty == tl.float32:
        values = tl.load(param + offset, mask=mask)
    elif beside.dtype.element_ty == tl.float32:
        values, master = tl.load(param + offset4, mask=mask).to(tl.float32), tl.load(beside + offset, mask=mask)
        values = tl.where(master.to(param.dtype.element_ty).to(tl.float32) == values, master, values)
    else:
        bits = tl.load(param + offset4, mask=mask).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low = bits * 0
        if beside.dtype.element_ty != tl.int64:
            known = tl.load(checksums + index // SPAN, mask=mask) == checksums_of(bits, mask)
            shift: tl.constexpr = 16 - beside.dtype.element_ty.primitive_bitwidth
            low = tl.where(known, (tl.load(beside + offset4, mask=mask).to(tl.int32) << shift) & 0xFFFF, 0)
        values = ((bits - (low >> 15)) << 16 | low).to(tl.float32, bitcast=True)
    return values


@triton.jit
def write_weights(weights, start, at, weight, words, mask):
    """Write new values of a block of weights, what belongs beside their parameters, and what `quantize` does.

    `words`: random bits, by which masters of 24 bits are rounded.
    """
    param, beside, checksums, quantized, factor = weights
    index, offset, offset4 = at
    if param.dtype.element_ty == tl.float32:
        tl.store(param + offset, weight, mask=mask)
        refresh(beside, offset4, weight, mask, beside.dtype.element_ty)
    elif beside.dtype.element_ty == tl.float32:
        tl.store(beside + offset, weight, mask=mask)
        low = weight.to(param.dtype.element_ty)
        tl.store(param + offset4, low, mask=mask)
        weight = low.to(tl.float32)
    else:
        bits = weight.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # a carry into the sign would give a zero
        if beside.dtype.element_ty == tl.int64:
            high = (bits + random_bits(beside, start, offset.shape[0])) >> 16
        else:
            shift: tl.constexpr = 16 - beside.dtype.element_ty.primitive_bitwidth
            if shift == 8:
                bits += tl.where((bits & 0x7FFFFFFF) < 0x7F7FFF00, (words & 0xFF).to(tl.int32), 0)
            high = (bits + 0x8000) >> 16
            tl.store(beside + offset4, (bits >> shift).to(beside.dtype.element_ty), mask=mask)
            first = index % SPAN == 0
            tl.store(
                checksums + index // SPAN,
                checksums_of(high & 0xFFFF, mask),
                mask=first if mask is None else first & mask,
            )
        tl.store(param + offset4, high.to(tl.int16).to(param.dtype.element_ty, bitcast=True), mask=mask)
        weight = (high << 16).to(tl.float32, bitcast=True)
    return quantize(quantized, factor, offset4, weight, mask)


@triton.jit
def checksums_of(bits, mask):
    """int32: for each of the block's parameters the checksum of its span, in which what the mask leaves out counts as
    0; see `ampcompile.kernels.masters`.
    """
    if mask is not None:
        bits = tl.where(mask, bits, 0)
    count: tl.constexpr = bits.shape[0]
    factor = (tl.arange(0, count) % SPAN).to(tl.uint32) * 0x9E3779B1
    factor = (factor ^ (factor >> 15)) * 0x85EBCA6B | 1
    spans = tl.reshape(bits * factor.to(tl.int32, bitcast=True), [count // SPAN, SPAN])
    return tl.reshape(tl.broadcast_to(tl.sum(spans, 1, keep_dims=True), [count // SPAN, SPAN]), [count])


@triton.jit
def random_bits(key, start, COUNT: tl.constexpr):
    """int32: see `ampcompile.kernels.masters.random_bits`."""
    group = start // 4 + tl.arange(0, COUNT // 4)
    low = group.to(tl.uint32)
    step, parameter = tl.load(key + 2).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(key), low, (group >> 32).to(tl.uint32), low * 0 + step, low * 0 + parameter)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNT])
    return (words & 0xFFFF).to(tl.int32)


@functools.cache
def _constants(
    grad: torch.dtype,
    param: torch.dtype,
    beside: torch.dtype | None,
    state: torch.dtype,
    quantized: bool,
    **more: int,
) -> Constants:
    # Which sums are fused would depend on the types, and so would bits of masters.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    types = {"GRAD": TYPES[grad], "PARAM": TYPES[param], "BESIDE": NO_COPY if beside is None else TYPES[beside]}
    types |= {"STATE": TYPES[state], "QUANTIZED": tl.float8e4nv if quantized else NO_COPY}
    return Constants(**types, **options, **more)


def launch(
    kernel: Any,
    table: tables.StepTable,
    words: Tensor,
    factors: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[Any, Any],
    optional: str,
    **constants: bool,
) -> None:
    """Launch the kernel once for each combination of types, with a program per chunk; and finish quantizing.

    `optional`: the kernel's constant for the optional state. Another pointer stands in for one that is None.
    """
    device, count = table.grads.device, len(table.grads.numels)
    others = words if factors is None else factors, words if found_inf is None else found_inf
    for kind in table.kinds:
        pieces = tables.chunks(table.padded, kind.chosen, device, workspace)
        if pieces.shape[0]:
            more: dict[str, int] = {optional: kind.has_state, "HAS_FOUND_INF": found_inf is not None, **constants}
            more |= {"CHUNK": tables.CHUNK, "BLOCK": BLOCK}
            fixed = _constants(kind.grad, kind.param, kind.beside, kind.state, bool(table.quantized), **more)
            start(kernel, pieces.shape[0], (words, pieces, *others), (count,), fixed, device)
    finish(table, words, workspace)
