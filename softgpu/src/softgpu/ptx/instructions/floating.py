"""Floating-point arithmetic, comparisons and choices."""

from collections.abc import Callable
from functools import partial

import numpy as np

from softgpu import floats
from softgpu.floats import Array, canonical, extreme, f4, f8, flushed, u2, u4, u8
from softgpu.ptx.operation import PACKED, Operation, Row

NEAREST = floats.UFUNCS | {"div": np.divide, "sqrt": np.sqrt, "rcp": lambda x: (1 / x.astype(f8)).astype(f4)}


def single(op: Operation) -> None:
    """Float32, alone, a pair, or with operands of 16 bits but for the last; flushed, clamped to [0, 1] if asked for."""
    mode, root, ftz = op.one_of("rn rz rm rp", "rn"), op.root, op.has("ftz")
    if root in ("min", "max"):
        fn: Callable[..., Array] = partial(extreme, largest=root == "max", nan=op.has("NaN"))
        if op.has("xorsign"):
            fn = partial(_with_signs, fn)
    elif mode == "rn":
        fn = floats.fused if root == "fma" else NEAREST[root]
    else:

        def fn(*xs: Array) -> Array:
            return floats.fused(*floats.PRODUCTS[root](*xs), mode)

    def compute(*xs: Array) -> Array:
        found = fn(*map(flushed, xs)) if ftz else fn(*xs)
        if op.has("sat"):
            found = np.where(found == found, np.clip(found, f4(0), f4(1)), f4(0))
        return canonical(flushed(found) if ftz else found)

    def both(*xs: Array) -> Array:
        low, high = (compute(*((x >> u8(s)).astype(u4).view(f4) for x in xs)).view(u4) for s in (0, 32))
        return low.astype(u8) | high.astype(u8) << u8(32)

    def mixed(*xs: Array) -> Array:
        return compute(*(floats.widen(x, op.t) for x in xs[:-1]), xs[-1])

    if op.to:
        return op.computes(mixed, f"{'t ' * (len(op.args) - 2)}f32")
    op.computes(both if op.t == "f32x2" else compute)


def _with_signs(fn: Callable[..., Array], a: Array, b: Array) -> Array:
    """Of magnitudes, with the signs' product."""
    found = fn(np.abs(a), np.abs(b))
    return np.where(np.signbit(a) ^ np.signbit(b), -found, found)


def approximate(op: Operation) -> None:
    fn, ftz = floats.APPROXIMATE[op.root], op.has("ftz")

    def compute(x: Array) -> Array:
        found = fn((flushed(x) if ftz else x).astype(f8)).astype(f4)
        return canonical(flushed(found) if ftz else found)

    op.computes(compute)


def double(op: Operation) -> None:
    fns = NEAREST | {
        "fma": floats.fused64,
        "min": partial(extreme, largest=False),
        "max": partial(extreme, largest=True),
    }
    op.computes(fns[op.root])


def high_reciprocal(op: Operation) -> None:
    """Of a float64's upper half, as its upper half."""
    high = u8(0xFFFFFFFF00000000)
    op.computes(lambda a: (1 / (a.view(u8) & high).view(f8)).view(u8) & high)


def narrow(op: Operation) -> None:
    """16 bits, alone or in pairs: products and sums rounded once from float64 rounded to odd."""
    form = PACKED.get(op.t, op.t)
    if op.root in ("min", "max"):
        fn: Callable[..., Array] = partial(extreme, largest=op.root == "max", nan=op.has("NaN"))
    else:

        def fn(*xs: Array) -> Array:
            return floats.product_plus(*floats.PRODUCTS[op.root](*xs))

    def compute(*xs: Array) -> Array:
        found = fn(*(floats.widen(x, form) for x in xs))
        found = np.maximum(found, found.dtype.type(0)) if op.has("relu") else found
        return floats.narrow(found, form)

    op.computes(floats.pairwise(compute) if op.t in PACKED else compute)


def sign(op: Operation) -> None:
    """Negation, magnitude, copied signs: of bits."""
    masks = {"f32": u4(1 << 31), "f64": u8(1 << 63), "f16": u2(1 << 15), "bf16": u2(1 << 15)}
    mask = u4(0x80008000) if op.t in PACKED else masks[op.t]
    t = f"b{8 * mask.itemsize}"
    if op.root == "copysign":
        return op.computes(lambda a, b: (a & mask) | (b & ~mask), f"{t} {t}")
    ftz = op.has("ftz")

    def compute(a: Array) -> Array:
        a = flushed(a.view(f4)).view(u4) if ftz else a
        return a ^ mask if op.root == "neg" else a & ~mask

    op.computes(compute, t)


def predicates(op: Operation, fn: Callable[[Array, Array], tuple[Array, Array]]) -> None:
    """Write what two operands compare to, joined with a third; to a second predicate the other result of `fn`."""
    outs, join = op.args[0].split("|"), floats.JOIN.get(op.one_of("and or xor"))

    def compute(a: Array, b: Array, *third: Array) -> Array | list[Array]:
        found = [join(each, *third) if join else each for each in fn(a, b)]
        return found if len(outs) == 2 else found[0]

    op.computes(compute, " ".join(["t t", *["pred"] * (len(op.args) - 3)]), outs)


def compare(op: Operation) -> None:
    """Floats: of 16 bits as float32, a pair as two predicates or as both at once."""
    how, form, ftz = op.modifiers[0], PACKED.get(op.t, op.t), op.has("ftz")
    wide = (lambda x: floats.widen(x, form)) if form in ("f16", "bf16") else flushed if ftz else (lambda x: x)

    def one(a: Array, b: Array) -> tuple[Array, Array]:
        found = floats.compared(how, wide(a), wide(b))
        return found, ~found

    def pair(a: Array, b: Array) -> tuple[Array, Array]:
        a, b = np.broadcast_arrays(a, b)
        low, high = (one((a >> u4(s)).astype(u2), (b >> u4(s)).astype(u2))[0] for s in (0, 16))
        return (low, high) if "|" in op.args[0] else (low & high, high)

    predicates(op, pair if op.t in PACKED else one)


HOW = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan and or xor"
NARROW = "f16 bf16 f16x2 bf16x2"
ROWS = [
    Row("add sub mul fma", "f32", "rn rz rm rp ftz sat", single),
    Row("add sub mul fma", "f32x2", "rn rz rm rp ftz", single),
    Row("add sub fma", "f16 bf16", "rn rz rm rp sat", single, to="f32"),
    Row("div sqrt rcp", "f32", "rn ftz", single),
    Row("min max", "f32", "ftz NaN xorsign abs", single),
    Row("div", "f32", "full approx ftz", single, approximate=True),
    Row("ex2 lg2 sin cos tanh rcp rsqrt sqrt", "f32", "approx ftz", approximate, approximate=True),
    Row("add sub mul fma div sqrt min max", "f64", "rn", double),
    Row("rcp", "f64", "approx ftz", high_reciprocal, approximate=True),
    Row("add sub mul fma", NARROW, "rn relu", narrow),
    Row("min max", NARROW, "NaN", narrow),
    Row("neg abs copysign", f"f32 f64 {NARROW}", "ftz", sign),
    Row("setp", f"f32 f64 {NARROW}", f"{HOW} ftz", compare),
]
