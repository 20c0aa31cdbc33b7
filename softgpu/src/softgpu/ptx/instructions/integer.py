"""Integer arithmetic, comparisons, and additions with a carry."""

from collections.abc import Callable

import numpy as np

from softgpu import floats, integers
from softgpu.floats import Array, u4, u8
from softgpu.ptx.instructions.floating import predicates
from softgpu.ptx.operation import PACKED, TYPES, Operation, Row

SIMPLE: dict[str, Callable[..., Array]] = floats.UFUNCS | {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "div": lambda a, b: integers.divided(a, b, rest=False),
    "rem": lambda a, b: integers.divided(a, b, rest=True),
}


def simple(op: Operation) -> None:
    op.computes(SIMPLE[op.root])


def pair(op: Operation) -> None:
    op.computes(floats.pairwise(SIMPLE[op.root], TYPES[PACKED[op.t]]))


def product(op: Operation) -> None:
    """A product, and what is added to it: its lower half, its upper half, or all of it."""
    t = np.dtype(TYPES[op.t])
    part, plus = op.one_of("lo hi wide", "lo"), op.root == "mad"
    whole = op.t[0] + str(16 * t.itemsize) if part == "wide" else op.t

    def multiply(a: Array, b: Array) -> Array:
        if part == "hi":
            return integers.high_product(a, b)
        wide = np.dtype(TYPES[whole])
        return a.astype(wide) * b.astype(wide)

    if plus:
        op.computes(lambda a, b, c: multiply(a, b) + c, f"t t {whole}")
    else:
        op.computes(multiply)


HOW = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def compare(op: Operation) -> None:
    how = floats.COMPARE[HOW.get(op.modifiers[0], op.modifiers[0])]

    def both(a: Array, b: Array) -> tuple[Array, Array]:
        found = how(a, b)
        return found, ~found

    predicates(op, both)


CARRY = "the carry of 32 bits"


def with_carry(op: Operation) -> None:
    """32 bits; what is carried over goes to a register that no text names."""
    root, takes, high = op.root[:3], op.root.endswith("c"), op.has("hi")
    if CARRY not in op.kernel.scopes[0]:
        op.kernel.scopes[0][CARRY] = len(op.kernel.widths)
        op.kernel.widths.append(4)
    op.args = [*op.args, CARRY] if takes else op.args

    def compute(*xs: Array) -> list[Array]:
        *wide, before = [x.astype(u8) for x in xs] if takes else [*(x.astype(u8) for x in xs), u8(0)]
        if root == "mad":
            whole = wide[0] * wide[1]
            total = (whole >> u8(32) if high else whole & u8(0xFFFFFFFF)) + wide[2] + before
        else:
            total = wide[0] + wide[1] + before if root == "add" else wide[0] - wide[1] - before
        return [total.astype(u4), (total >> u8(32) & u8(1)).astype(u4)]

    op.computes(compute, " ".join(["u32"] * (len(op.args) - 1)), [op.args[0], CARRY])


def sum_or_product(op: Operation) -> None:
    """With `cc` a carry is kept."""
    (with_carry if op.has("cc") else product if op.root == "mad" else simple)(op)


WHOLE = "u16 s16 u32 s32 u64 s64"
ROWS = [
    Row("addc subc madc", "u32 s32", "cc lo hi", with_carry),
    Row("add sub min max", "s16x2 u16x2", "", pair),
    Row("add sub", "u32 s32", "cc", sum_or_product),
    Row("mad", "u32 s32", "cc lo hi wide", sum_or_product),
    Row("add sub min max div rem neg abs", WHOLE, "", simple),
    Row("and or xor not cnot", "pred b16 b32 b64", "", simple),
    Row("mul mad", WHOLE, "lo hi wide", product),
    Row("setp", f"{WHOLE} b16 b32 b64", "eq ne lt le gt ge lo ls hi hs and or xor", compare),
]
