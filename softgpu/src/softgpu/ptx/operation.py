"""One instruction on its way from text to arrays: its name, modifiers, types, and what its row of the table makes it.

An instruction is known if a row has its name and type, and knows every modifier. Whatever else raises, with its line.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from softgpu.floats import Array, f4, f8, i1, i2, i4, i8, u1, u2, u4
from softgpu.memory import EmulatorError
from softgpu.program import UNSIGNED, Instruction

TYPES: dict[str, Any] = {"pred": np.bool_, "f32": f4, "f64": f8, "f16": u2, "bf16": u2, "e4m3": u1, "e5m2": u1}
TYPES |= {f"u{8 * k}": t for k, t in UNSIGNED.items()} | {f"b{8 * k}": t for k, t in UNSIGNED.items()}
TYPES |= {"s8": i1, "s16": i2, "s32": i4, "s64": i8}
PACKED = {f"{t}x2": t for t in ("f16", "bf16", "s16", "u16", "e4m3", "e5m2")}
TYPES |= {name: u2 if t[0] == "e" else u4 for name, t in PACKED.items()} | {"f32x2": UNSIGNED[8]}


def size_of(t: str) -> int:
    return np.dtype(TYPES[t]).itemsize


def signature(text: str, t: str) -> list[str]:
    """Types of operands: `t` stands for the instruction's own."""
    return [t if each == "t" else each for each in text.split()]


class Row(NamedTuple):
    """Instructions of one kind: `names`, `types`, and `modifiers` that it knows, each separated by spaces.

    `build` makes one of them of an `Operation`. A conversion has types `to`, too. `approximate`: a GPU gives other last
    bits; here they are rounded correctly.
    """

    names: str
    types: str
    modifiers: str
    build: Callable[["Operation"], None]
    to: str = ""
    approximate: bool = False


class Operation:
    """An instruction's name and operands; `t` is its last type, `to` the one before."""

    def __init__(self, kernel: Any, ins: Instruction, name: str, args: list[str]) -> None:
        self.kernel, self.ins, self.args = kernel, ins, args
        self.root, *rest = name.split(".")
        kinds = [each for each in rest if each in TYPES]
        self.kinds, self.t, self.to = kinds, kinds[-1] if kinds else "", kinds[-2] if len(kinds) > 1 else ""
        self.modifiers = [each for each in rest if each not in TYPES]

    def build(self) -> None:
        """Make the instruction, by its row."""
        for row in self.rows():
            if self.t in (row.types.split() or [""]) and self.to in (row.to.split() or [""]):
                unknown = {*self.modifiers} - {*row.modifiers.split()}
                if unknown:
                    continue
                return row.build(self)
        raise EmulatorError("this instruction isn't known; add it to a table in softgpu/src/softgpu/ptx/instructions/")

    def rows(self) -> list[Row]:
        from softgpu.ptx.instructions import TABLE  # which need this file

        return TABLE.get(self.root, [])

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, choices: str, default: str = "") -> str:
        return next((each for each in self.modifiers if each in choices.split()), default)

    def computes(self, fn: Callable[..., Any], operands: str = "", outs: list[str] | None = None) -> None:
        """A function of all operands but the first, which is written: they come as arrays of their types.

        With several `outs` it returns an array for each.
        """
        ins, outs = self.ins, outs or self.args[:1]
        types = signature(operands, self.t) or [self.t] * (len(self.args) - 1)
        kinds = [np.dtype(TYPES[each]) for each in types]
        ins.out = [self.kernel.register(each) for each in outs]
        ins.src = [self.kernel.operand(arg, each) for arg, each in zip(self.args[1:], types, strict=True)]
        widths = [4 if each is None else self.kernel.widths[each] for each in ins.out]

        def does(*xs: Array) -> Any:
            found = fn(*[as_type(x, kind) for x, kind in zip(xs, kinds, strict=True)])
            if len(widths) == 1:
                return as_register(found, widths[0])
            return [as_register(each, width) for each, width in zip(found, widths, strict=True)]

        ins.does = does

    def acts(self, fn: Callable[..., Any], out: list[str], *operands: tuple[str, str]) -> None:
        """A function (run, threads, instruction, operands) that writes registers `out`; operands are (text, type)."""
        self.ins.acts, self.ins.does = True, fn
        self.ins.out = [self.kernel.register(each) for each in out]
        self.ins.src = [self.kernel.operand(text, t) for text, t in operands]

    def width(self, names: list[str]) -> int:
        """Bytes of the widest of some registers."""
        numbers = [self.kernel.register(each) for each in names]
        return max(self.kernel.widths[each] for each in numbers if each is not None)


def as_type(x: Array, kind: Any) -> Array:
    """A register's lowest bits as a type."""
    if x.dtype == kind:
        return x
    if x.dtype.itemsize > kind.itemsize:
        x = x.astype(UNSIGNED[kind.itemsize])
    return x.view(kind)


def as_register(x: Array, width: int) -> Array:
    """A result as a register holds it: signs of integers are extended."""
    x = np.asarray(x)
    if width == 0 or x.dtype.itemsize == width:
        return x if x.dtype.kind in "ub" else x.view(UNSIGNED[width])
    return x.astype(f"{x.dtype.kind}{width}").view(UNSIGNED[width])


def group(text: str) -> list[str]:
    """The members of {a, b}; or the only one."""
    return parts(text[1:-1]) if text.startswith("{") else [text]


def parts(text: str) -> list[str]:
    """What commas outside of brackets separate."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [*found, current.strip()] if current.strip() else found
