"""Integer arithmetic of registers: shifts beyond their width, high halves of products, division, bytes and bits."""

from typing import Any

import numpy as np

from softgpu.floats import Array, i8, u1, u4, u8

WIDE = np.uint64(0xFFFFFFFF)


def high_product(a: Array, b: Array) -> Array:
    """The upper half of a product of two numbers of one type."""
    t = a.dtype
    if t.itemsize < 8:
        wide = i8 if t.kind == "i" else u8
        return (a.astype(wide) * b.astype(wide) >> wide(8 * t.itemsize)).astype(t)
    x, y = a.view(u8), b.view(u8)
    x0, x1, y0, y1 = x & WIDE, x >> u8(32), y & WIDE, y >> u8(32)
    middle = (x0 * y0 >> u8(32)) + (x1 * y0 & WIDE)
    carry = middle + x0 * y1
    top = x1 * y1 + (x1 * y0 >> u8(32)) + (carry >> u8(32)) + ((carry < middle).astype(u8) << u8(32))
    if t.kind == "i":
        top = top - np.where(a < 0, y, u8(0)) - np.where(b < 0, x, u8(0))
    return top.view(t)


def divided(a: Array, b: Array, rest: bool) -> Array:
    """The quotient, rounded to zero, or the rest; by zero all ones, or `a`."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a - quotient * safe != 0) & ((a < 0) != (safe < 0)))
    found = a - quotient * safe if rest else quotient
    return np.where(b == 0, a if rest else ~b.dtype.type(0), found).astype(a.dtype)


def shifted(a: Array, by: Array, left: bool) -> Array:
    """Shifted by any number of bits: by the width or more, all are gone, or copies of the sign."""
    t = a.dtype
    bits = 8 * t.itemsize
    over, n = by >= bits, np.minimum(by, u4(bits - 1)).astype(t)
    if left:
        return np.where(over, t.type(0), a << n)
    return a >> n if t.kind == "i" else np.where(over, t.type(0), a >> n)


def funnel(low: Array, high: Array, by: Array, left: bool, wrap: bool) -> Array:
    """32 bits of a pair of words, shifted by up to 32."""
    n = (by & u4(31) if wrap else np.minimum(by, u4(32))).astype(u8)
    both = low.astype(u8) | high.astype(u8) << u8(32)
    return ((both << n >> u8(32)) if left else both >> n).astype(u4)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes out of eight, each chosen by four bits; the fourth bit asks for copies of the byte's sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both, found = a.astype(u8) | b.astype(u8) << u8(32), np.zeros(a.shape, u4)
    for k in range(4):
        pick = (selector >> u4(4 * k)) & u4(15)
        byte = (both >> ((pick & u4(7)).astype(u8) * u8(8)) & u8(255)).astype(u4)
        found |= np.where(pick & u4(8), (byte >> u4(7)) * u4(255), byte) << u4(8 * k)
    return found


def of_three(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any function of three bits, by its table."""
    found = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), a.dtype)
    for bit in range(8):
        if int(table) >> bit & 1:
            found |= (a if bit & 4 else ~a) & (b if bit & 2 else ~b) & (c if bit & 1 else ~c)
    return found


def bit_rows(a: Array) -> Array:
    """Each number's bits, the highest first: (numbers, bits)."""
    size = np.atleast_1d(a).dtype.itemsize
    return np.unpackbits(np.atleast_1d(a).astype(f">u{size}").view(u1).reshape(-1, size), axis=1)


def leading_zeros(a: Array) -> Array:
    rows = bit_rows(a)
    return np.where(rows.any(1), rows.argmax(1), rows.shape[1]).astype(u4)


def reversed_bits(a: Array) -> Array:
    size = a.dtype.itemsize
    return np.packbits(bit_rows(a)[:, ::-1], axis=1).view(f">u{size}").reshape(-1).astype(a.dtype)


def low_mask(length: Array, t: Any) -> Array:
    """`length` ones, up to the width."""
    bits = 8 * np.dtype(t).itemsize
    ones = (t(1) << np.minimum(length, u4(bits - 1)).astype(t)) - t(1)
    return np.where(length >= bits, ~t(0), ones)


def field(a: Array, start: Array, length: Array) -> Array:
    """Some bits of a number, as a number of its type; signs are extended."""
    t, bits = a.dtype, 8 * a.dtype.itemsize
    start, length = np.minimum(start & u4(255), u4(bits)), np.minimum(length & u4(255), u4(bits))
    if t.kind == "u":
        return (shifted(a, start, False) & low_mask(length, t.type)).astype(t)
    room = np.maximum(bits - start.astype(i8) - length.astype(i8), 0).astype(u4)
    found = shifted(shifted(a, room, True), np.minimum(room + start, u4(bits - 1)), False)
    return np.where(length == 0, t.type(0), found).astype(t)


def inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    """`b` with the lowest bits of `a` at a place."""
    start, length = start & u4(255), length & u4(255)
    mask = shifted(low_mask(length, a.dtype.type).astype(a.dtype), start, True)
    return (b & ~mask) | (shifted(a, start, True) & mask)
