"""Each row of the table of PTX against torch, libm or Python's integers, on numbers at the edges and drawn ones."""

import ctypes
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from softgpu.floats import LIBM, Array, canonical
from softgpu.memory import Global
from softgpu.ptx.instructions import bits, conversions, floating, integer
from softgpu.ptx.launch import parsed
from softgpu.ptx.operation import TYPES, size_of
from softgpu.threads import Launch

LIBM.fmaf.restype, LIBM.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
COUNT = 256
LETTER = {0: "p", 1: "rs", 2: "rs", 4: "r", 8: "rd"}
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EDGES = [1.5, 2.0**-130, 65519.0, 65520.0, 448.0, 464.0, math.nan]
EDGES += [sign * edge for edge in (0.0, 1.0, 3e38, math.inf) for sign in (1, -1)]


def bits_of(x: torch.Tensor) -> Array:
    return x.contiguous().view(BITS[x.itemsize]).numpy()


def drawn(t: str, rng: np.random.Generator) -> Array:
    """Bits of numbers of a type."""
    t = t.removesuffix("x2")
    if t in FLOATS:
        numbers = rng.standard_normal(COUNT) * np.exp2(rng.integers(-20, 20, COUNT))
        numbers[: len(EDGES) * 4] = rng.permutation(EDGES * 4)
        return bits_of(torch.from_numpy(numbers).to(FLOATS[t]))
    if t == "pred":
        return rng.integers(0, 2, COUNT).astype(np.int8)
    low, high = -(1 << 8 * size_of(t) - 1), (1 << 8 * size_of(t) - 1) - 1
    edges = [0, 1, -1, low, high, 5, -7, 31, 32, 33]
    numbers = rng.integers(low, high, COUNT, endpoint=True)
    numbers[:40] = rng.permutation(edges * 4)
    return numbers.astype(f"i{size_of(t)}")


def emulated(instruction: str, out: str, inputs: list[tuple[str, Array]]) -> Array:
    """What an instruction makes of columns of numbers; $0, $1, ... stand for its operands, $o for the result."""
    lines, memory, params = [], [], []
    for k, (t, column) in enumerate(inputs):
        width = column.dtype.itemsize
        register = f"%{LETTER[width]}{10 + k}"
        lines += [
            f"ld.param.u64 %rd1, [p{k}];",
            f"mad.wide.u32 %rd2, %r1, {width}, %rd1;",
            f"ld.global.b{8 * width} {register}, [%rd2];",
        ]
        if t == "pred":
            lines.append(f"setp.ne.s16 %p{10 + k}, {register}, 0;")
            register = f"%p{10 + k}"
        instruction = instruction.replace(f"${k}", register)
    width = size_of(out) if out != "pred" else 0
    result = np.zeros(COUNT, f"u{width or 2}")
    lines.append(instruction.replace("$o", f"%{LETTER[width]}9") + ";")
    lines += [f"ld.param.u64 %rd1, [p{len(inputs)}];", f"mad.wide.u32 %rd2, %r1, {result.itemsize}, %rd1;"]
    lines += ["selp.b16 %rs9, 1, 0, %p9;"] if out == "pred" else []
    lines.append(f"st.global.b{8 * result.itemsize} [%rd2], %{LETTER[result.itemsize]}9;")
    columns = [column for _, column in inputs] + [result]
    memory = [(column.ctypes.data, column.nbytes) for column in columns]
    params = ", ".join(f".param .u64 p{k}" for k in range(len(columns)))
    declared = ".reg .pred %p<32>; .reg .b16 %rs<32>; .reg .b32 %r<32>; .reg .b64 %rd<32>;"
    body = "\n".join([declared, "mov.u32 %r1, %tid.x;", *lines, "ret;"])
    kernel = parsed(f".version 8.7\n.visible .entry one({params})\n.reqntid {COUNT}\n{{\n{body}\n}}\n")
    Launch(kernel, (1,), [np.uint64(at).tobytes() for at, _ in memory], Global(memory))
    return result


def rounded(x: Fraction, mode: str) -> float:
    """A number as float32, in a direction, by exact comparison."""
    largest = np.finfo(np.float32).max
    near = np.float32(float(min(max(x, -Fraction(float(largest))), Fraction(float(largest)))))
    to = -math.inf if mode == "rm" or (mode == "rz" and x > 0) else math.inf
    beyond = Fraction(float(near)) > x if to < 0 else Fraction(float(near)) < x
    with np.errstate(over="ignore"):
        return float(np.nextafter(near, np.float32(to)) if beyond else near)


def of_torch(fn, *types: str):
    """A reference by torch: columns as tensors of their types, the result's bits."""

    def reference(*columns: Array) -> Array:
        tensors = zip(map(torch.from_numpy, columns), types, strict=True)
        return bits_of(fn(*(x.view(FLOATS.get(t, x.dtype)) for x, t in tensors)))

    return reference


def of_python(fn, t: str, out: str = ""):
    """A reference by Python's integers, each operand as a number of the type."""
    out = out or t

    def reference(*columns: Array) -> Array:
        sizes, size = [c.dtype.itemsize for c in columns], size_of(out)
        columns = [c.view(TYPES[t] if s == size_of(t) else f"u{s}") for c, s in zip(columns, sizes, strict=True)]
        return np.array([fn(*map(int, row)) & (1 << 8 * size) - 1 for row in zip(*columns, strict=True)], f"u{size}")

    return reference


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    call = LIBM.fmaf if a.dtype == torch.float32 else LIBM.fma
    return torch.tensor([call(*row) for row in zip(*(x.tolist() for x in (a, b, c)), strict=True)], dtype=a.dtype)


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bit_field(a: int, start: int, length: int) -> int:
    return (a & 0xFFFFFFFF) >> min(start & 255, 32) & (1 << min(length & 255, 32)) - 1


def whole(x: torch.Tensor) -> torch.Tensor:
    """float32 to int32 as a GPU: saturated, NaN gives 0."""
    found = x.double().nan_to_num(0).clamp(-(2.0**31), 2.0**31 - 1)
    return found.trunc().int()


def with_signs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmin(a.abs(), b.abs()).copysign(torch.where(a.signbit() == b.signbit(), 1.0, -1.0))


def extreme(fn, largest: bool):
    """By torch, which leaves the sign of a zero open; a GPU's -0 is below +0."""

    def ordered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        zeros = a + b if largest else -(-a - b)
        return torch.where((a == 0) & (b == 0), zeros, fn(a, b))

    return ordered


def approximately(fn):
    return of_torch(lambda x: fn(x.double()).float(), "f32")


def root(x: torch.Tensor) -> torch.Tensor:
    """Rounded as IEEE 754 asks, by NumPy in float64, then once to float32; torch's own is off by one on some CPUs."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.double().numpy())).float()


def numbers(bits: Array, t: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}").copy()).view(FLOATS[t]).double()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Codes of numbers, saturated."""
    return torch.where(x.isnan(), x, x.clamp(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).int()


def as_float16(x: torch.Tensor) -> torch.Tensor:
    codes = e4m3(x)
    bits = codes.byte().view(torch.float8_e4m3fn).half().view(torch.int16).int() & 0xFFFF
    return torch.where(codes & 127 == 127, 0x7FFF, bits)


def upper_half(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int64) & ~0xFFFFFFFF).view(torch.float64)


def directed(fn, mode: str):
    """Of exact fractions, rounded once; where a number isn't finite, as torch."""

    def reference(*columns: Array) -> Array:
        rows = zip(*(numbers(c, "f32").tolist() for c in columns), strict=True)
        found = [rounded(fn(*map(Fraction, row)), mode) if all(map(math.isfinite, row)) else fn(*row) for row in rows]
        return np.array(found, np.float32)

    return reference


NAMES = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
SINGLE = [
    (f"{n}.rn.{t}", t, f"{t} {t}", of_torch(f, t, t)) for n, f in NAMES.items() for t in ("f32", "f64", "f16", "bf16")
]
DOUBLES = [("div.rn.f64", torch.div), ("min.f64", extreme(torch.fmin, False)), ("max.f64", extreme(torch.fmax, True))]
APPROXIMATE = {"ex2": torch.exp2, "lg2": torch.log2, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "rcp": torch.reciprocal, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt}  # fmt: skip
# fmt: off
CASES = [
    *SINGLE,
    *((name, "f64", "f64 f64", of_torch(fn, "f64", "f64")) for name, fn in DOUBLES),
    *((f"{n}.approx.f32", "f32", "f32", approximately(f)) for n, f in APPROXIMATE.items()),
    ("fma.rn.f32", "f32", "f32 f32 f32", of_torch(fma, "f32", "f32", "f32")),
    ("fma.rn.f32.bf16", "f32", "bf16 bf16 f32",
        of_torch(lambda a, b, c: fma(a.float(), b.float(), c), "bf16", "bf16", "f32")),
    ("sub.rn.f32.f16", "f32", "f16 f32", of_torch(lambda a, b: a.float() - b, "f16", "f32")),
    ("fma.rn.f64", "f64", "f64 f64 f64", of_torch(fma, "f64", "f64", "f64")),
    ("div.rn.f32", "f32", "f32 f32", of_torch(torch.div, "f32", "f32")),
    ("div.full.f32", "f32", "f32 f32", of_torch(torch.div, "f32", "f32")),
    ("sqrt.rn.f32", "f32", "f32", of_torch(root, "f32")),
    ("min.f32", "f32", "f32 f32", of_torch(extreme(torch.fmin, False), "f32", "f32")),
    ("min.xorsign.abs.f32", "f32", "f32 f32", of_torch(with_signs, "f32", "f32")),
    ("max.NaN.f32", "f32", "f32 f32", of_torch(extreme(torch.maximum, True), "f32", "f32")),
    ("min.NaN.bf16", "bf16", "bf16 bf16", of_torch(extreme(torch.minimum, False), "bf16", "bf16")),
    ("neg.f32", "f32", "f32", of_torch(torch.neg, "f32")),
    ("abs.bf16", "bf16", "bf16", of_torch(torch.abs, "bf16")),
    ("setp.ltu.f32", "pred", "f32 f32", of_torch(lambda a, b: (~(a >= b)).short(), "f32", "f32")),
    ("setp.neu.bf16", "pred", "bf16 bf16", of_torch(lambda a, b: (a != b).short(), "bf16", "bf16")),
    ("setp.lt.s64", "pred", "s64 s64", of_torch(lambda a, b: (a < b).short(), "s64", "s64")),
    *((f"{n}.s32", "s32", "s32 s32", of_python(f, "s32")) for n, f in {
        "add": int.__add__, "sub": int.__sub__, "min": min, "max": max, "mul.lo": int.__mul__, "div": quotient,
        "mul.hi": lambda a, b: a * b >> 32, "rem": lambda a, b: a - quotient(a, b) * b if b else a}.items()),
    ("mul.hi.s64", "s64", "s64 s64", of_python(lambda a, b: a * b >> 64, "s64")),
    ("mul.hi.u64", "u64", "u64 u64", of_python(lambda a, b: a * b >> 64, "u64")),
    ("mad.wide.s32", "s64", "s32 s32 s64", lambda a, b, c: a.astype(np.int64) * b + c),
    ("mad.lo.s32", "s32", "s32 s32 s32", of_python(lambda a, b, c: a * b + c, "s32")),
    ("add.s16x2", "b32", "b32 b32", lambda a, b: (a.view(np.int16) + b.view(np.int16)).view(np.int32)),
    ("add.cc.u32 %r8, $0, $1; addc.u32 $o, 0, 0", "u32", "u32 u32", of_python(lambda a, b: a + b >> 32, "u32")),
    ("mad.lo.cc.u32 %r8, $0, $1, $1; addc.u32 $o, 0, 0", "u32", "u32 u32",
        of_python(lambda a, b: (a * b & 0xFFFFFFFF) + b >> 32, "u32")),
    *((f"{n}.b32", "b32", "b32 b32", of_python(f, "b32")) for n, f in {
        "and": int.__and__, "or": int.__or__, "xor": int.__xor__}.items()),
    ("shl.b32", "b32", "b32 u32", of_python(lambda a, n: a << min(n, 32), "b32")),
    ("shr.s64", "s64", "s64 u32", of_python(lambda a, n: a >> min(n, 64), "s64")),
    ("shf.l.wrap.b32", "b32", "b32 b32 b32", of_python(lambda a, b, n: (b << 32 | a) << (n & 31) >> 32, "b32")),
    ("prmt.b32 $o, $0, $1, 0x5410", "b32", "b32 b32", of_python(lambda a, b: a & 0xFFFF | b << 16, "b32")),
    ("lop3.b32 $o, $0, $1, $2, 0x96", "b32", "b32 b32 b32", of_python(lambda a, b, c: a ^ b ^ c, "b32")),
    ("bfe.u32", "u32", "u32 u32 u32", of_python(bit_field, "u32")),
    ("bfi.b32 $o, $0, $1, 8, 4", "b32", "b32 b32", of_python(lambda a, b: b & ~0xF00 | (a & 15) << 8, "b32")),
    ("popc.b32", "u32", "b32", of_python(int.bit_count, "b32")),
    ("clz.b64", "u32", "b64", of_python(lambda a: 64 - a.bit_length(), "b64", "u32")),
    ("bfind.u32", "u32", "u32", of_python(lambda a: a.bit_length() - 1, "u32")),
    ("selp.b32", "b32", "b32 b32 pred", lambda a, b, p: np.where(p, a, b)),
    ("mov.b32 {%rs8, %rs7}, $0; mov.b32 $o, {%rs7, %rs8}", "b32", "b32", of_python(lambda a: a >> 16 | a << 16, "b32")),
    ("rcp.approx.ftz.f64", "b64", "f64", of_torch(lambda x: upper_half(1 / upper_half(x)), "f64")),
    ("cvt.s64.s32", "s64", "s32", lambda a: a.astype(np.int64)),
    ("cvt.sat.u16.s32", "u16", "s32", lambda a: np.clip(a, 0, 65535).astype(np.uint16)),
    ("cvt.rn.f32.s64", "f32", "s64", of_torch(lambda a: a.float(), "s64")),
    ("cvt.rn.bf16.s32", "bf16", "s32", of_torch(lambda a: a.double().to(torch.bfloat16), "s32")),
    ("cvt.rzi.s32.f32", "s32", "f32", of_torch(whole, "f32")),
    *((f"cvt.rn.{to}.f32", to, "f32", of_torch(lambda x, to=to: x.to(FLOATS[to]), "f32")) for to in ("f16", "bf16")),
    *((f"cvt.f32.{of}", "f32", of, of_torch(lambda x: x.float(), of)) for of in ("f16", "bf16")),
    ("cvt.rn.f32.f64", "f32", "f64", of_torch(lambda x: x.float(), "f64")),
    ("cvt.rn.satfinite.e4m3x2.f32", "b16", "f32 f32",
        of_torch(lambda a, b: (e4m3(a) << 8 | e4m3(b)).short(), "f32", "f32")),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs8, 0f00000000, $0; cvt.rn.f16x2.e4m3x2 $o, %rs8", "b32", "f32",
        of_torch(as_float16, "f32")),
    ("cvt.rn.satfinite.e4m3x2.f16x2", "b16", "f16x2",
        lambda a: e4m3(numbers(a.astype(np.uint16), "f16")).numpy().astype(np.uint16)),
    ("mul.rn.f32x2", "b64", "b64 b64",
        np.errstate(all="ignore")(lambda a, b: canonical(a.view(np.float32) * b.view(np.float32)).view(np.uint64))),
    *((f"{n}.{mode}.f32", "f32", " ".join(["f32"] * count), directed(fn, mode))
      for mode in ("rz", "rm", "rp") for n, count, fn in
      [("add", 2, lambda a, b: a + b), ("mul", 2, lambda a, b: a * b), ("fma", 3, lambda a, b, c: a * b + c)]),
]
# fmt: on


def zeros_may_differ(instruction: str) -> bool:
    """Fractions have no -0."""
    return any(mode in instruction for mode in (".rz.", ".rm.", ".rp."))


@pytest.mark.parametrize(
    ("instruction", "out", "types", "reference"), CASES, ids=[case[0].split("$")[0].strip() for case in CASES]
)
def test_numbers(instruction, out, types, reference):
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    inputs = [(t, drawn(t, rng)) for t in types.split()]
    if types == "f16x2":
        inputs = [(t, x.view(np.uint16).astype(np.uint32)) for t, x in inputs]
    text = instruction if "$" in instruction else f"{instruction} $o, {', '.join(f'${k}' for k in range(len(inputs)))}"
    found = emulated(text, out, inputs)
    expected = reference(*(x for _, x in inputs))
    if out in FLOATS:
        torch.testing.assert_close(numbers(found, out), numbers(expected, out), rtol=0, atol=0, equal_nan=True)
        signs = found >> 8 * found.itemsize - 1 == expected.view(found.dtype) >> 8 * found.itemsize - 1
        unsigned = (numbers(found, out) == 0) & zeros_may_differ(instruction)
        assert (signs | (numbers(found, out).isnan() | unsigned).numpy()).all()
    else:
        unsigned = found.astype(f"u{expected.dtype.itemsize}")
        wrong = np.flatnonzero(unsigned != expected.view(unsigned.dtype))
        assert not len(wrong), [hex(int(x[wrong[0]])) for x in (*(x for _, x in inputs), found, expected)]


def test_every_row_has_its_numbers():
    """What memory, warps and branches do is tested by kernels."""
    names = [name.split()[0].split(".") for case in CASES for name in case[0].split(";")]
    for row in (row for kind in (floating, integer, bits, conversions) for row in kind.ROWS):
        assert any(is_of(row, root, rest) for root, *rest in names), f"no case is of the row {row.names}, {row.types}"


def is_of(row, root: str, rest: list[str]) -> bool:
    kinds, modifiers = [t for t in rest if t in TYPES], {t for t in rest if t not in TYPES}
    to = kinds[-2] if len(kinds) > 1 else ""
    known = modifiers <= {*row.modifiers.split()} and to in (row.to.split() or [""])
    return known and root in row.names.split() and kinds[-1] in row.types.split()
