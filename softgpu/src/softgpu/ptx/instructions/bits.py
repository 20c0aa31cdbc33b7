"""Moves, choices, and what is done to bits: shifts, bytes, fields, counts."""

from collections.abc import Callable

import numpy as np

from softgpu import integers
from softgpu.floats import Array, u4
from softgpu.program import UNSIGNED
from softgpu.ptx.operation import PACKED, TYPES, Operation, Row, group, size_of


def move(op: Operation) -> None:
    """A register's number or address; or several narrow ones as one, or one as several."""
    target, source = op.args
    size = size_of(op.t)
    if source.startswith("{"):
        op.args = [target, *group(source)]
        width = 8 * size // (len(op.args) - 1)
        wide = UNSIGNED[size]

        def join(*xs: Array) -> Array:
            found = xs[0].astype(wide)
            for k, x in enumerate(xs[1:], 1):
                found = found | x.astype(wide) << wide(k * width)
            return found

        op.computes(join, " ".join([f"b{width}"] * (len(op.args) - 1)))
    elif target.startswith("{"):
        outs = group(target)
        width, part = 8 * size // len(outs), UNSIGNED[size // len(outs)]
        wide = UNSIGNED[size]
        op.computes(lambda x: [(x >> wide(k * width)).astype(part) for k in range(len(outs))], f"b{8 * size}", outs)
    else:
        op.computes(lambda x: x)


def choose(op: Operation) -> None:
    raw = "pred" if op.t == "pred" else "b32" if op.t in PACKED else f"b{8 * size_of(op.t)}"
    op.computes(lambda a, b, p: np.where(p, a, b), f"{raw} {raw} pred")


def shift(op: Operation) -> None:
    left = op.root == "shl"
    op.computes(lambda a, by: integers.shifted(a, by, left), "t u32")


def funnel(op: Operation) -> None:
    left, wrap = op.has("l"), op.has("wrap")
    op.computes(lambda low, high, by: integers.funnel(low, high, by, left, wrap))


FIELDS: dict[str, tuple[Callable[..., Array], str]] = {
    "prmt": (integers.permuted, "t t t"),
    "lop3": (lambda a, b, c, table: integers.of_three(a, b, c, np.asarray(table).flat[0]), "t t t t"),
    "bfe": (integers.field, "t u32 u32"),
    "bfi": (integers.inserted, "t t u32 u32"),
    "popc": (lambda a: integers.bit_rows(a).sum(1).astype(u4), "t"),
    "clz": (integers.leading_zeros, "t"),
    "brev": (integers.reversed_bits, "t"),
}


def field(op: Operation) -> None:
    op.computes(*FIELDS[op.root])


def highest(op: Operation) -> None:
    """The place of the highest one, of a negative number's highest zero; none gives all ones."""
    bits, signed = 8 * size_of(op.t), op.t[0] == "s"

    def find(a: Array) -> Array:
        a = np.where(a < 0, ~a, a) if signed else a
        return u4(bits - 1) - integers.leading_zeros(a.view(TYPES[f"u{bits}"]))

    op.computes(find)


ROWS = [
    Row("mov cvta", "pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64", "to global shared local param", move),
    Row("selp", "pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 f16 bf16 f16x2 bf16x2", "", choose),
    Row("shl shr", "b16 u16 s16 b32 u32 s32 b64 u64 s64", "", shift),
    Row("shf", "b32", "l r wrap clamp", funnel),
    Row("prmt lop3", "b32", "", field),
    Row("bfe", "u32 s32 u64 s64", "", field),
    Row("bfi", "b32 b64", "", field),
    Row("popc clz brev", "b32 b64", "", field),
    Row("bfind", "u32 s32 u64 s64", "", highest),
]
