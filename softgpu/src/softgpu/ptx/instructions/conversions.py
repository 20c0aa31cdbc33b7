"""Conversions: each rounds once, in the direction that it names, to numbers or to the largest one if it saturates."""

import numpy as np

from softgpu.floats import ROUND, Array, bits_of, canonical, f4, f8, flushed, narrow, u1, u2, u4, widen
from softgpu.ptx.operation import PACKED, TYPES, Operation, Row

WHOLE = {f"{mode}i": ROUND[mode] for mode in ("rn", "rz", "rm", "rp")}


def between_integers(op: Operation) -> None:
    to, of = np.dtype(TYPES[op.to]), np.dtype(TYPES[op.t])
    low, high = (max, min)[0](np.iinfo(to).min, np.iinfo(of).min), min(np.iinfo(to).max, np.iinfo(of).max)
    saturate = op.has("sat")
    op.computes(lambda x: (np.clip(x, of.type(low), of.type(high)) if saturate else x).astype(to))


def of_integers(op: Operation) -> None:
    """To floats. NumPy rounds float64 and float32 to the nearest; of 64 bits to 16, float64 is rounded to odd."""
    mode, to = op.one_of("rn rz rm rp", "rn"), op.to

    def convert(x: Array) -> Array:
        if to in ("f32", "f64") and mode == "rn":
            return x.astype(TYPES[to])
        wide = x.astype(f8)
        if x.dtype.itemsize == 8:
            exact = [int(each) == int(number) for each, number in zip(wide.flat, x.flat, strict=True)]
            down = np.array([abs(int(each)) < abs(int(n)) for each, n in zip(wide.flat, x.flat, strict=True)])
            bits = wide.view(np.int64)
            bits = np.where(np.array(exact), bits, np.where(down, bits, bits - 1) | 1)
            wide = bits.view(f8)
        return bits_of(wide, to, mode).astype(u4).view(f4) if to == "f32" else narrow(wide, to, mode)

    op.computes(convert)


def to_integers(op: Operation) -> None:
    """NaN gives 0, and what is too large the largest."""
    of, to = op.t, np.dtype(TYPES[op.to])
    mode, ftz, info = WHOLE[op.one_of("rni rzi rmi rpi")], op.has("ftz"), np.iinfo(TYPES[op.to])

    def convert(x: Array) -> Array:
        x = widen(x, of) if of in ("f16", "bf16") else flushed(x) if ftz else x
        whole = mode(np.where(x == x, x, 0).astype(f8))
        above, below = whole >= float(info.max), whole <= float(info.min)
        found = np.where(above | below, 0, whole).astype(to)
        return np.where(above, to.type(info.max), np.where(below, to.type(info.min), found))

    op.computes(convert)


def between_floats(op: Operation) -> None:
    to, of = op.to, op.t
    mode, ftz = op.one_of("rn rz rm rp", "rn"), op.has("ftz")
    whole = WHOLE.get(op.one_of("rni rzi rmi rpi"))

    def convert(x: Array) -> Array:
        x = widen(x, of) if of in ("f16", "bf16") else flushed(x) if ftz else x
        x = whole(x) if whole else x
        x = np.maximum(x, x.dtype.type(0)) if op.has("relu") else x
        x = np.where(x == x, np.clip(x, 0, 1), 0).astype(x.dtype) if op.has("sat") else x
        if to in ("f16", "bf16"):
            return narrow(x, to, mode, op.has("satfinite"))
        if to == "f64":
            return x.astype(f8)
        x = x.astype(f4) if mode == "rn" else bits_of(x, "f32", mode).astype(u4).view(f4)
        return canonical(flushed(x) if ftz else x)

    op.computes(convert)


def two_numbers(op: Operation) -> None:
    """Two float32 numbers as one register; the first operand is the upper half."""
    form, mode = PACKED[op.to], op.one_of("rn rz", "rn")
    half, whole = (8, u2) if form[0] == "e" else (16, u4)

    def convert(*xs: Array) -> Array:
        xs = tuple(np.maximum(x, f4(0)) for x in xs) if op.has("relu") else xs
        high, low = (narrow(x, form, mode, op.has("satfinite")).astype(whole) for x in xs)
        return high << whole(half) | low

    op.computes(convert)


def pair(op: Operation) -> None:
    """A pair of 8-bit numbers of a pair of 16-bit ones, or the other way."""
    to, of = PACKED[op.to], PACKED[op.t]

    def convert(x: Array) -> Array:
        shape = x.shape
        numbers = widen(np.ascontiguousarray(x).reshape(-1).view(u1 if of[0] == "e" else u2), of)
        found = narrow(numbers, to, "rn", op.has("satfinite"))
        return found.view(u2 if to[0] == "e" else u4).reshape(shape)

    op.computes(convert)


INTEGERS = "u8 s8 u16 s16 u32 s32 u64 s64"
MODES = "rn rz rm rp"
ROWS = [
    Row("cvt", INTEGERS, "sat", between_integers, to=INTEGERS),
    Row("cvt", INTEGERS, MODES, of_integers, to="f16 bf16 f32 f64"),
    Row("cvt", "f16 bf16 f32 f64", "rni rzi rmi rpi ftz", to_integers, to=INTEGERS),
    Row("cvt", "f16 bf16 f32 f64", f"{MODES} rni rzi rmi rpi ftz sat", between_floats, to="f32 f64"),
    Row("cvt", "f16 bf16 f32 f64", "rn rz rni rzi rmi rpi sat satfinite relu", between_floats, to="f16 bf16"),
    Row("cvt", "f32", "rn rz relu satfinite", two_numbers, to="f16x2 bf16x2 e4m3x2 e5m2x2"),
    Row("cvt", "f16x2", "rn satfinite", pair, to="e4m3x2 e5m2x2"),
    Row("cvt", "e4m3x2 e5m2x2", "rn", pair, to="f16x2"),
]
