"""One machine instruction on its way from text to arrays: its operands by kinds, and its row of the table.

Kinds: i, s: 32 bits, unsigned and signed; l: a pair of registers; f, d: floats of 32 and 64 bits; p: a predicate;
h, b: the halves of a register, each a float16 or bfloat16.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from softgpu.floats import Array, canonical, f2, f4, f8, i4, u2, u4, u8, widen
from softgpu.memory import EmulatorError
from softgpu.program import Instruction

SIGN4, SIGN8 = u4(1 << 31), u8(1 << 63)


class Row(NamedTuple):
    """Instructions of some names, the modifiers that they know, and what makes one of them."""

    names: str
    modifiers: str
    build: Callable[["Operation"], None]


class Operation:
    """An instruction's name, modifiers and operands."""

    def __init__(self, code: Any, ins: Instruction, name: str, args: list[str]) -> None:
        self.code, self.ins = code, ins
        self.root, *self.modifiers = name.split(".")
        self.args = [each.strip() for each in args]

    def build(self) -> None:
        from softgpu.machine_code.instructions import TABLE  # which need this file

        uniform = self.root[1:] if self.root.startswith("U") and self.root not in TABLE else self.root
        for row in TABLE.get(uniform, []):
            if {*self.modifiers} <= {*row.modifiers.split()}:
                self.root = uniform
                return row.build(self)
        raise EmulatorError("this instruction isn't known; add it to a table in softgpu/src/softgpu/machine_code/")

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, choices: str, default: str = "") -> str:
        return next((each for each in self.modifiers if each in choices.split()), default)

    def predicates_after(self, first: int) -> int:
        """How many operands from one on are predicates."""
        count = 0
        while first + count < len(self.args) and re.fullmatch(r"!?U?P[0-9T]", self.args[first + count]):
            count += 1
        return count

    def computes(self, fn: Callable[..., Any], outs: str, operands: str) -> None:
        """A function of the operands behind `outs`, which it returns, several as a list."""
        to, of = outs.split(), operands.split()
        if len(self.args) != len(to) + len(of):
            raise EmulatorError(f"{len(to) + len(of)} operands are known, not {len(self.args)}")
        read = self.reader([*zip(self.args[len(to) :], of, strict=True)])
        write = self.writer([*zip(self.args, to)])  # noqa: B905 - the rest are operands
        self.ins.does = lambda *xs: write(fn(*read(xs)))

    def acts(self, fn: Callable[..., Any], outs: list[tuple[str, str]], operands: list[tuple[str, str]]) -> None:
        """A function (run, threads, instruction, operands)."""
        self.ins.acts = True
        read, write = self.reader(operands), self.writer(outs)
        self.ins.does = lambda run, i, ins, *xs: write(fn(run, i, ins, *read(xs)))

    def reader(self, operands: list[tuple[str, str]]) -> Callable[[tuple[Array, ...]], list[Array]]:
        """Add operands to the instruction's; the result makes numbers of their registers."""
        readers = []
        for text, kind in operands:
            slots, convert = self.operand(text, kind)
            readers.append((len(self.ins.src), len(slots), convert))
            self.ins.src += slots
        return lambda xs: [convert(*xs[at : at + count]) for at, count, convert in readers]

    def writer(self, outs: list[tuple[str, str]]) -> Callable[[Any], Any]:
        """Add registers that are written; the result makes of what is computed what they hold."""
        kinds = [kind for _, kind in outs]
        for text, kind in outs:
            numbers: list[int | None] = [None, None] if kind in "ld" else [None]
            if text[-1] not in "ZT":
                first = self.code.register(text)
                numbers = [first + k for k in range(len(numbers))]
            self.ins.out += numbers

        def write(found: Any) -> Any:
            several = [found] if len(kinds) == 1 else found or []
            words = [word for each, kind in zip(several, kinds, strict=True) for word in words_of(each, kind)]
            return words if len(words) > 1 else words[0] if words else None

        return write

    def operand(self, text: str, kind: str) -> tuple[list[Any], Callable[..., Array]]:
        """The registers or constants that an operand is read from, and how."""
        found = re.fullmatch(r"([-~!]?)(\|?)([^|]*?)(\.H[01]_H[01])?\|?(\.H[01]_H[01])?", text.strip())
        if found is None:
            raise EmulatorError(f"no operand is known of the form {text}")
        sign, size, name, half = found[1], bool(found[2]), found[3], found[4] or found[5] or ""
        slots = self.slots(name, kind)
        if slots is None:  # a number, with its own sign
            return [constant(text.strip(), kind)], lambda x: x
        return slots, lambda *words: changed(joined(words, kind, half), sign, size, kind)

    def slots(self, name: str, kind: str) -> list[Any] | None:
        """Registers, their constant ones and constants of the launch; None for a number."""
        wide = 2 if kind in "ld" else 1
        if name in ("RZ", "URZ"):
            return [u4(0)] * wide
        if name in ("PT", "UPT"):
            return [np.True_]
        if re.fullmatch(r"U?[RP]\d+|L\d+", name):
            return [self.code.register(name) + k for k in range(wide)]
        if found := re.fullmatch(r"c\[0x0\]\[0x([0-9a-f]+)\]", name):
            return [self.code.special(f"c[0x0][0x{int(found[1], 16) + 4 * k:x}]") for k in range(wide)]
        return None


def words_of(x: Array, kind: str) -> list[Array]:
    """What registers hold of a result; a NaN of 32 bits is the only one that a GPU writes."""
    if kind == "p":
        return [x]
    if kind == "f":
        return [canonical(np.asarray(x, f4))]
    if kind in "ld":
        both = np.asarray(x).view(u8)
        return [both.astype(u4), (both >> u8(32)).astype(u4)]
    return [np.asarray(x).view(u4)]


def joined(words: tuple[Array, ...], kind: str, half: str) -> Array:
    """Registers as a number's kind."""
    if kind in "ld":
        both = words[0].astype(u8) | words[1].astype(u8) << u8(32)
        return both.view(f8) if kind == "d" else both
    if half:
        one = words[0] >> u4(16) if half[2] == "1" else words[0] & u4(0xFFFF)
        return one | one << u4(16)
    return words[0].view({"f": f4, "s": i4}.get(kind, words[0].dtype.type))


def changed(x: Array, sign: str, size: bool, kind: str) -> Array:
    """With the signs that an operand asks for: of floats the bit, of integers the number."""
    if kind in "hb":
        mask = u4(0x80008000)
        return (x & ~mask if size else x) ^ (mask if sign == "-" else u4(0))
    if kind in "fd":
        mask = SIGN4 if kind == "f" else SIGN8
        bits = x.view(mask.dtype)
        bits = bits & ~mask if size else bits
        return (bits ^ mask if sign == "-" else bits).view(x.dtype)
    if sign in ("~", "!"):
        return ~x
    return ~x + x.dtype.type(1) if sign == "-" else np.abs(x) if size else x


def constant(text: str, kind: str) -> Any:
    """A number as text."""
    if kind in "fd":
        t = f4 if kind == "f" else f8
        if re.fullmatch(r"-?0x[0-9a-f]+", text):
            return np.array(int(text, 16) & 0xFFFFFFFF, u4).view(f4)[()]
        return t(float(text.replace("QNAN", "nan").replace("SNAN", "nan")))
    if kind in "hb":
        bits = np.array(float(text.replace("QNAN", "nan")), f2 if kind == "h" else f4)
        return u4(bits.view(u2)) if kind == "h" else u4(bits.view(u4) >> u4(16))
    number = int(text, 0)
    return u8(number & (1 << 64) - 1) if kind == "l" else (u4(number & 0xFFFFFFFF)).view(i4 if kind == "s" else u4)


def halves(x: Array, kind: str) -> Array:
    """The two 16-bit floats of each register, as float32: (numbers, 2)."""
    flat = np.ascontiguousarray(np.atleast_1d(x)).view(u2).reshape(-1, 2)
    return widen(flat, "f16" if kind == "h" else "bf16")
