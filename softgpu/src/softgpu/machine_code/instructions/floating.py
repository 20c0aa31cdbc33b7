"""Floats of 64, 32 and 16 bits, and conversions."""

import numpy as np

from softgpu import floats
from softgpu.floats import Array, bits_of, extreme, f4, f8, flushed, narrow, u4, u8
from softgpu.machine_code.operation import Operation, Row, halves


def arithmetic(op: Operation) -> None:
    """Sums and products, of 32 bits with subnormals flushed if asked for."""
    name, mode, double = op.root[1:].lower(), op.one_of("RN RZ RM RP", "RN").lower(), op.root[0] == "D"
    fused, ftz = floats.fused64 if double else floats.fused, op.has("FTZ")

    def compute(*xs: Array) -> Array:
        xs = tuple(map(flushed, xs)) if ftz else xs
        found = floats.UFUNCS[name](*xs) if mode == "rn" and name != "fma" else fused(*floats.PRODUCTS[name](*xs), mode)
        return flushed(found) if ftz else found

    kind = "d" if double else "f"
    op.computes(compute, kind, " ".join([kind] * (len(op.args) - 1)))


def smaller(op: Operation) -> None:
    nan = op.has("NAN")
    op.computes(lambda a, b, p: np.where(p, extreme(a, b, False, nan), extreme(a, b, True, nan)), "f", "f f p")


def compare(op: Operation) -> None:
    name, join, ftz = op.modifiers[0].lower(), floats.JOIN[op.one_of("AND OR XOR").lower()], op.has("FTZ")

    def both(a: Array, b: Array, p: Array) -> list[Array]:
        found = floats.compared(name, flushed(a) if ftz else a, flushed(b) if ftz else b)
        return [join(found, p), join(~found, p)]

    kind = op.root[0].lower()
    op.computes(both, "p p", f"{kind} {kind} p")


def compare_halves(op: Operation) -> None:
    """The lower halves to the first predicate, the upper ones to the second."""
    kind, name, join = (
        "b" if op.has("BF16_V2") else "h",
        op.one_of(HOW).lower(),
        floats.JOIN[op.one_of("AND OR XOR").lower()],
    )

    def both(a: Array, b: Array, p: Array) -> list[Array]:
        found = floats.compared(name, halves(a, kind), halves(b, kind))
        return [join(found[:, k], p) for k in (0, 1)]

    op.computes(both, "p p", f"{kind} {kind} p")


def fused_halves(op: Operation) -> None:
    """Two products and sums of 16 bits; of a constant the first number is that of the upper half."""
    kind, form = ("b", "bf16") if op.has("BF16_V2") else ("h", "f16")

    def compute(a: Array, b: Array, *c: Array) -> Array:
        packed = c[0] << u4(16) | c[1] if len(c) == 2 else c[0]
        found = floats.product_plus(*(halves(x, kind) for x in (a, b, packed)))
        return np.ascontiguousarray(narrow(found, form)).view(u4).reshape(-1)

    op.computes(compute, "i", " ".join([kind] * (len(op.args) - 1)))


def sum_of_halves(op: Operation) -> None:
    """Two float16, of halves that operands name, as float32."""
    op.computes(lambda a, b: halves(a, "h")[:, 0] + halves(b, "h")[:, 0], "f", "h h")


def choose(op: Operation) -> None:
    op.computes(lambda a, b, p: np.where(p, a, b).view(u4), "i", "f f p")


def pack(op: Operation) -> None:
    """Two float32 numbers in 16 or 8 bits, the first one above; of 8 bits, below the lower half of a third register."""
    form, saturate = op.one_of("F16 BF16 E4M3 E5M2").lower(), op.has("SATFINITE")

    def convert(a: Array, b: Array, *below: Array) -> Array:
        high, low = (narrow(x, form, "rn", saturate).astype(u4) for x in (a, b))
        if not below:
            return high << u4(16) | low
        return high << u4(8) | low | below[0] << u4(16)

    op.computes(convert, "i", "f f i" if op.has("PACK_AB_MERGE_C") else "f f")


def between(op: Operation) -> None:
    if op.modifiers[0] in ("F16", "BF16"):  # in the lower half
        form = op.modifiers[0].lower()
        return op.computes(lambda x: narrow(x, form).astype(u4), "i", "f")
    to, of = ({"F32": "f", "F64": "d"}[each] for each in op.modifiers[:2])
    op.computes(lambda x: x.astype(f8 if to == "d" else f4), to, of)


def of_integer(op: Operation) -> None:
    """To float32; 64 bits fit in no float64, so what is rounded up is one more than what was cut off."""
    source, mode = op.one_of("U64 U32 S32 U16 S16 U8 S8"), op.one_of("RP", "RN").lower()
    kind = {"U64": "l", "S32": "s"}.get(source, "i")

    def convert(x: Array) -> Array:
        if source in ("U16", "S16", "U8", "S8"):  # of the lowest bits
            size = int(source[1:]) // 8
            return x.astype(f"u{size}").view(f"{'i' if source[0] == 'S' else 'u'}{size}").astype(f4)
        if mode == "rn":
            return x.astype(f4)
        wide = x.astype(f8) if kind == "i" else (x >> u8(11)).astype(f8) + ((x & u8(2047)) != 0) * 0.5
        found = bits_of(wide, "f32", mode).astype(u4).view(f4)
        return found if kind == "i" else found * f4(2048)

    op.computes(convert, "f", kind)


def of_32_bits(op: Operation) -> None:
    """To float64, which holds them all."""
    op.computes(lambda x: x.astype(f8), "d", "i" if op.has("U32") else "s")


def to_integer(op: Operation) -> None:
    wide = op.has("U64")
    t, top = (u8, 2.0**64) if wide else (u4, 2.0**32)

    def convert(x: Array) -> Array:
        whole = np.trunc(np.where(x == x, x, f4(0)).astype(f8))
        found = np.clip(whole, 0, top - 2048).astype(t) if wide else np.clip(whole, 0, top - 1).astype(t)
        return np.where(whole >= top, ~t(0), found)

    op.computes(convert, "l" if wide else "i", "f")


def check_division(op: Operation) -> None:
    """Whether a quotient needs the slow way, which is right for all: here wherever exponents are near an end."""

    def slow(a: Array, b: Array) -> Array:
        x, y = ((v.view(u4) >> u4(23) & u4(255)).astype(np.int32) for v in (a, b))
        return (x < 27) | (x > 252) | (y < 3) | (y > 250) | (abs(x - y) > 120)

    op.computes(slow, "p", "f f")


def function(op: Operation) -> None:
    """Correctly rounded, where a GPU's last bits differ; 64H: of a float64's upper half."""
    name = op.modifiers[0].lower().removesuffix("64h")
    fn = floats.APPROXIMATE["rsqrt" if name == "rsq" else name]
    if op.modifiers[0].endswith("64H"):
        return op.computes(lambda x: (fn((x.astype(u8) << u8(32)).view(f8)).view(u8) >> u8(32)).astype(u4), "i", "i")
    op.computes(lambda x: fn(x.astype(f8)).astype(f4), "f", "f")


HOW = "EQ NE LT LE GT GE EQU NEU LTU LEU GTU GEU NUM NAN"
ROWS = [
    Row("FADD FMUL FFMA", "FTZ RZ RM RP", arithmetic),
    Row("DADD DMUL DFMA", "RZ RM RP", arithmetic),
    Row("FMNMX", "NAN", smaller),
    Row("FSETP DSETP", f"{HOW} AND OR XOR FTZ", compare),
    Row("HSETP2", f"{HOW} AND OR XOR BF16_V2", compare_halves),
    Row("HFMA2", "MMA BF16_V2", fused_halves),
    Row("HADD2", "F32", sum_of_halves),
    Row("FSEL", "", choose),
    Row("F2FP", "F16 BF16 E4M3 E5M2 F32 SATFINITE PACK_AB PACK_AB_MERGE_C", pack),
    Row("F2F", "F16 BF16 F32 F64", between),
    Row("I2F I2FP", "F32 U64 U32 S32 U16 S16 U8 S8 RP", of_integer),
    Row("I2F", "F64 U32 S32", of_32_bits),
    Row("F2I", "U64 U32 FTZ TRUNC NTZ", to_integer),
    Row("FCHK", "", check_division),
    Row("MUFU", "EX2 LG2 RCP RSQ SQRT RCP64H RSQ64H", function),
]
