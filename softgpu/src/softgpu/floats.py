"""Floating-point arithmetic as a GPU does it: formats of 8 to 32 bits, rounded once, in every direction.

NumPy's float32 and float64 round to the nearest, as a GPU's do. What it lacks is here: narrow formats, directed
rounding, fused multiplication, minima that pass over NaN, the one NaN that a GPU writes.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""Of NumPy, of any type; or one of its numbers."""
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64


class Format(NamedTuple):
    """A format's bits; where `infinity` is False, larger numbers become the largest."""

    exponent: int
    fraction: int
    nan: int
    infinity: bool = True


FORMATS = {
    "f16": Format(5, 10, 0x7FFF),
    "bf16": Format(8, 7, 0x7FFF),
    "e4m3": Format(4, 3, 0x7F, infinity=False),
    "e5m2": Format(5, 2, 0x7F),
    "f32": Format(8, 23, 0x7FFFFFFF),
}
ROUND: dict[str, Callable[[Array], Array]] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
}
DOWNWARD, UPWARD, TO_ZERO = 0x400, 0x800, 0xC00  # of fenv.h on x86
DIRECTIONS = {"rn": 0, "rm": DOWNWARD, "rp": UPWARD, "rz": TO_ZERO}
LIBM = ctypes.CDLL("libm.so.6")
LIBM.fma.restype, LIBM.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


def bits_of(x: Array, form: str, mode: str = "rn", saturate: bool = False) -> Array:
    """Float64 numbers in a narrower format, rounded once: int64 codes."""
    exponent_bits, fraction, nan, has_infinity = FORMATS[form]
    x = np.asarray(x, f8)
    bias, infinity = (1 << exponent_bits - 1) - 1, ((1 << exponent_bits) - 1) << fraction
    largest = infinity - 1 if has_infinity else FORMATS[form].nan - 1
    finite = np.clip(np.where(x == x, x, 0.0), -(2.0**1000), 2.0**1000)
    exponent = np.where(finite == 0, 1 - bias, np.maximum(np.frexp(finite)[1] - 1, 1 - bias))
    quanta = np.abs(ROUND[mode](np.ldexp(finite, fraction - exponent)))
    code = ((exponent + bias - 1).astype(i8) << fraction) + quanta.astype(i8)
    if saturate or not has_infinity:
        code = np.minimum(code, largest)
    else:
        to_zero = {"rz": np.True_, "rm": x > 0, "rp": x < 0}.get(mode, np.False_)
        code = np.where(code >= infinity, np.where(to_zero & np.isfinite(x), largest, infinity), code)
    return np.where(x == x, code | np.signbit(x).astype(i8) << exponent_bits + fraction, nan)


def narrow(x: Array, form: str, mode: str = "rn", saturate: bool = False) -> Array:
    """Float32 or float64 numbers as bits of a narrow format: uint16 or uint8. Usual ones are fast."""
    if form == "f16" and mode == "rn" and not saturate:
        return np.where(x == x, x.astype(f2).view(u2), u2(0x7FFF))
    if form == "bf16" and mode == "rn" and not saturate and x.dtype == f4:
        bits = x.view(u4)
        bits = ((bits + u4(0x7FFF) + (bits >> u4(16) & u4(1))) >> u4(16)).astype(u2)
        return np.where(x == x, bits, u2(0x7FFF))
    return bits_of(x, form, mode, saturate).astype(u1 if form[0] == "e" else u2)


def e4m3_numbers() -> Array:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 127 == 127, np.nan, np.where(codes >> 7, -size, size)).astype(f4)


E4M3 = e4m3_numbers()


def widen(bits: Array, form: str) -> Array:
    """Bits of a format of 16 or 8 bits as float32 numbers."""
    if form == "f16":
        return bits.view(f2).astype(f4)
    if form == "bf16":
        return (bits.astype(u4) << u4(16)).view(f4)
    return E4M3[bits] if form == "e4m3" else (bits.astype(u2) << u2(8)).view(f2).astype(f4)


def canonical(x: Array) -> Array:
    """Float32 numbers as bits, every NaN being the one that a GPU writes."""
    lost = x != x
    return np.where(lost, u4(0x7FFFFFFF), x.view(u4)) if lost.any() else x.view(u4)


def flushed(x: Array) -> Array:
    """Float32 numbers, those below the smallest normal one as zeros of their sign."""
    return np.where(np.abs(x) < f4(2.0**-126), np.copysign(f4(0), x), x)


def product_plus(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of numbers of 32 bits or fewer, as float64 rounded to odd: whatever is rounded next is rounded once."""
    product, c = np.asarray(a, f8) * b, np.asarray(c, f8)
    total = np.atleast_1d(product + c)
    back = total - product
    error = (product - (total - back)) + (c - back)
    odd = np.isfinite(total) & np.isfinite(error) & (error != 0) & (total.view(i8) & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(odd, total.view(i8) + step, total.view(i8)).view(f8)


def fused(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c of float32 numbers, rounded once."""
    total = product_plus(a, b, c)
    if mode == "rn":
        return total.astype(f4)
    exact_zero = (total == 0) & (np.asarray(a, f8) * b != 0)  # x - x is -0 if rounded down
    found = bits_of(np.where(exact_zero, -0.0 if mode == "rm" else 0.0, total), "f32", mode)
    return found.astype(u4).view(f4)


def fused64(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c of float64 numbers, rounded once, by libm."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, f8) for x in (a, b, c)))
    threes = zip(*(x.ravel().tolist() for x in (a, b, c)), strict=True)
    LIBM.fesetround(DIRECTIONS[mode])
    try:
        found = [LIBM.fma(*three) for three in threes]
    finally:
        LIBM.fesetround(0)
    return np.array(found, f8).reshape(a.shape)


def extreme(a: Array, b: Array, largest: bool, nan: bool = False) -> Array:
    """The larger or smaller number: a NaN loses against a number unless `nan`, and -0 is below +0."""
    found = (np.fmax if largest else np.fmin)(a, b)
    zeros = (found == 0) & (a == b)
    if np.any(zeros):
        join = np.logical_and if largest else np.logical_or
        signs = np.where(join(np.signbit(a), np.signbit(b)), found.dtype.type(-1), found.dtype.type(1))
        found = np.where(zeros, np.copysign(found.dtype.type(0), signs), found)
    return np.where((a != a) | (b != b), found.dtype.type(np.nan), found) if nan else found


# By the names that PTX and machine code have for them.
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
ONE, NO = f4(1), f4(-0.0)
PRODUCTS: dict[str, Callable[..., tuple[Array, ...]]] = {  # each as a product and a sum, which is rounded once
    "add": lambda a, b: (a, ONE, b),
    "sub": lambda a, b: (a, ONE, -b),
    "mul": lambda a, b: (a, b, NO),
    "fma": lambda a, b, c: (a, b, c),
}
APPROXIMATE: dict[str, Callable[[Array], Array]] = {  # of float64, so they are rounded correctly
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def compared(how: str, a: Array, b: Array) -> Array:
    """Floats compared: false where one is NaN, true if `how` ends in u; num and nan ask for nothing else."""
    lost = (a != a) | (b != b)
    if how in ("num", "nan"):
        return lost if how == "nan" else ~lost
    return COMPARE[how[:2]](a, b) | lost if len(how) == 3 else COMPARE[how](a, b) & ~lost


def pairwise(fn: Callable[..., Array], of: type = u2) -> Callable[..., Array]:
    """A function of 16-bit numbers as one of registers that hold a pair; a function of one stays that."""

    def each(*xs: Array) -> Array:
        shape = np.broadcast_shapes(*(np.shape(x) for x in xs))
        halves = [np.ascontiguousarray(np.broadcast_to(x, shape)).view(of) for x in xs]
        return np.ascontiguousarray(fn(*halves)).view(u4)

    return each
