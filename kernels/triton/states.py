"""Optimizer states in 16 or 8 bits, as an update reads and writes them; see `ampcompile.kernels.states`."""

import triton
import triton.language as tl

from .. import tables

SPAN, CODES = tl.constexpr(tables.SPAN), tl.constexpr(tables.CODES)
LEAST_FIRST, LEAST_SECOND = map(tl.constexpr, tables.LEAST_SCALES)
LONG_MEMORY = tl.constexpr(tables.LONG_MEMORY)


@triton.jit
def mixed(x):
    """A hash of a uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def coding_of(row, tensor_count, step, beta):
    """What a tensor's states are read and written with: scales, the rows' length, and what decides the rounding.

    `row`: where the address of the scales stands; behind it, see `ampcompile.kernels.states.Coding`.
    """
    scales = tl.load(row).to(tl.pointer_type(tl.float32))
    length = tl.load(row + tensor_count)
    key = tl.load(row + 3 * tensor_count)
    begin = mixed(key.to(tl.uint32) + mixed(step.to(tl.int32).to(tl.uint32)))
    middle = mixed((key >> 32).to(tl.uint32) ^ begin)
    rounding = (tl.load(row + 2 * tensor_count), begin, middle, beta > LONG_MEMORY)
    return scales, length, rounding


@triton.jit
def place_of(start, length, size, STATE: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of a block, counted as if rows were filled up; their offsets; and the mask of what is there."""
    index = start + tl.arange(0, BLOCK)
    offset = index
    mask = offset < size
    if tl.int8 == STATE:
        spans = ((length + SPAN - 1) // SPAN).to(tl.uint32)  # of a row
        span = (index.to(tl.uint64) // SPAN).to(tl.uint32)
        column = (span % spans).to(tl.int64) * SPAN + tl.arange(0, BLOCK) % SPAN
        offset = (span // spans).to(tl.int64) * length + column
        mask = (offset < size) & (column < length)
    return index, offset, mask


@triton.jit
def random_words(rounding, offset):
    """uint32: random bits for each element's states."""
    first, begin, middle, _at_random = rounding
    place = first + offset
    x = place.to(tl.uint32) + (place >> 32).to(tl.uint32) * 0x9E3779B1 + begin
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ middle) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def read_scales(scales, start, mask, COUNT: tl.constexpr, MOMENTS: tl.constexpr):
    """The scale of each element of a block; a full one reads each once."""
    if mask is not None:
        return tl.load(scales + (start + tl.arange(0, COUNT)) // CODES * MOMENTS, mask=mask)
    blocks = tl.load(scales + (start // CODES + tl.arange(0, COUNT // CODES)) * MOMENTS)
    return tl.reshape(tl.broadcast_to(blocks[:, None], [COUNT // CODES, CODES]), [COUNT])


@triton.jit
def read_moment(moment, scales, start, offset, mask, IS_SQUARE: tl.constexpr, MOMENTS: tl.constexpr):
    """float32: a block of a first or second moment, one of so many."""
    type: tl.constexpr = moment.dtype.element_ty
    values = tl.load(moment + offset, mask=mask).to(tl.float32)
    if type.primitive_bitwidth == 8:
        scale = read_scales(scales + IS_SQUARE, start, mask, offset.shape[0], MOMENTS)
        if IS_SQUARE:
            values = tl.div_rn(values, values * 0.0 + 255.0) * scale
            values = values * values
        else:
            values = tl.div_rn(values, 254.0 - tl.abs(values)) * scale
    return values


@triton.jit
def write_moment(
    moment,
    scales,
    index,
    offset,
    mask,
    values,
    words,
    rounding,
    IS_SQUARE: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    """Write a block of a first or second moment, one of so many."""
    type: tl.constexpr = moment.dtype.element_ty
    _first, _begin, middle, at_random = rounding
    if IS_SQUARE:
        at_random = True
    else:
        words = words * 0x9E3779B1 + middle
        words = (words ^ (words >> 15)) * 0x85EBCA6B
        words = words ^ (words >> 13)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if type == tl.float32:
        tl.store(moment + offset, values, mask=mask)
    elif type == tl.bfloat16:
        high = tl.minimum((magnitude + (words >> 16).to(tl.int32)) >> 16, 0x7F7F) | (bits >> 31) << 15
        rounded = high.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(
            moment + offset,
            tl.where(at_random & (magnitude < 0x7F800000), rounded, values.to(tl.bfloat16)),
            mask=mask,
        )
    else:
        magnitude = tl.where(magnitude < 0x7F800000, magnitude, 0)
        if mask is not None:
            magnitude = tl.where(mask, magnitude, 0)
        count: tl.constexpr = values.shape[0]
        blocks = tl.max(tl.reshape(magnitude, [count // CODES, CODES]), 1, keep_dims=True)
        scale = tl.reshape(tl.broadcast_to(blocks, [count // CODES, CODES]), [count]).to(tl.float32, bitcast=True)
        sizes = tl.abs(values)
        if IS_SQUARE:
            scale, sizes = tl.sqrt_rn(scale), tl.sqrt_rn(values)
            scale = tl.where(scale < LEAST_SECOND, 0.0, scale)
        else:
            scale = tl.where(scale < LEAST_FIRST, 0.0, scale)
        ratio = tl.div_rn(sizes, scale)
        ratio = tl.where(ratio <= 1.0, ratio, 1.0)
        exact = 255.0 * ratio if IS_SQUARE else tl.div_rn(254.0 * ratio, 1.0 + ratio)
        below = exact.to(tl.int32)
        chance = tl.where(at_random, (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, 0.5)
        code = below + (chance < exact - below.to(tl.float32)).to(tl.int32)
        above_zero = tl.maximum(code, (values > 0.0).to(tl.int32))
        code = above_zero if IS_SQUARE else tl.where(values < 0.0, -code, code)
        tl.store(moment + offset, tl.where(scale == 0.0, 0, code).to(type), mask=mask)
        first = index % CODES == 0
        tl.store(scales + index // CODES * MOMENTS + IS_SQUARE, scale, mask=first if mask is None else first & mask)
