"""A program of instructions, in basic blocks, each of them a Python function made of array operations."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from softgpu.floats import Array, u1, u2, u4, u8

UNSIGNED: dict[int, Any] = {1: u1, 2: u2, 4: u4, 8: u8}


class Instruction:
    """What is read, written and done; `line` of the code as text, `source` in Triton's source.

    `does` takes the operands, each an array with a number for each thread, or a constant; if `acts`, then before them
    the run, the numbers of the threads (None: all), and the instruction. It returns what is written to `out`. `end`
    says how it ends a basic block: branch, exit, barrier, return, or sync, a barrier of warps.
    """

    __slots__ = ("acts", "also", "does", "end", "guard", "line", "out", "source", "src", "target", "text")

    def __init__(self, text: str, line: int, source: tuple[str, int] | None = None) -> None:
        self.text, self.line, self.source = text, line, source
        self.guard: tuple[int, bool] | None = None
        self.also: tuple[int, bool] | None = None  # a branch's second condition
        self.out: list[int | None] = []
        self.src: list[Any] = []
        self.does: Callable[..., Any] = nothing
        self.acts = False
        self.end, self.target = "", ""


def by_name(rows: Iterable[Any]) -> dict[str, list[Any]]:
    """A table's rows by the names of their instructions."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        for name in row.names.split():
            found.setdefault(name, []).append(row)
    return found


def nothing(*_: Any) -> None:
    """What an instruction does that only orders others."""


class Block:
    """A basic block: its instructions, the one that ends it, if one does, and the blocks that may come then."""

    def __init__(self, body: list[Instruction], end: Instruction | None, following: int, target: int) -> None:
        self.body, self.end, self.following, self.target = body, end, following, target
        self.made: dict[bool, Code] = {}

    def code(self, whole: bool) -> "Code":
        """What runs it for all threads, or for some; made when it is first run."""
        if whole not in self.made:
            self.made[whole] = code_of(self.body, whole)
        return self.made[whole]


class Code(NamedTuple):
    """A function (run, registers, threads), and the instruction that each of its lines is of."""

    run: Callable[..., None]
    lines: list[Instruction]


class Program:
    """A kernel: instructions and registers, `widths` in bytes, 0 for a predicate; `params` are (name, at, size)."""

    name = ""
    threads = 128
    shared_size = local_size = 0
    specials: dict[str, int]
    special_value: Callable[..., Array]

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.widths: list[int] = []
        self.labels: dict[str, int] = {}
        self.params: list[tuple[str, int, int]] = []
        self.param_bytes = 0
        self.constants: list[Array] = []  # arrays in global memory that are the program's own
        self.blocks: list[Block] = []

    def split(self, more_starts: Iterable[int] = ()) -> None:
        """Fill `blocks`."""
        count = len(self.instructions)
        jumps = {self.labels[ins.target] for ins in self.instructions if ins.target}
        after = {i + 1 for i, ins in enumerate(self.instructions) if ins.end}
        starts = sorted(s for s in {0, *jumps, *after, *more_starts} if s < count)
        self.numbers = {s: k for k, s in enumerate(starts)}
        for k, s in enumerate(starts):
            body = self.instructions[s : starts[k + 1] if k + 1 < len(starts) else count]
            end = body[-1] if body[-1].end else None
            body = body[:-1] if end else body
            target = self.numbers.get(self.labels[end.target], len(starts)) if end and end.target else -1
            self.blocks.append(Block(body, end, k + 1, target))


def put(registers: list[Array], at: int | None, threads: Array, values: Array) -> None:
    """Write a register of some threads; arrays are shared between registers, so it is a new one."""
    if at is not None:
        new = registers[at].copy()
        new[threads] = values
        registers[at] = new


def code_of(body: list[Instruction], whole: bool) -> Code:
    """A basic block's instructions as a Python function."""
    names: dict[str, Any] = {"put": put, "np": np}
    lines: list[tuple[str, Instruction | None]] = [("def block(run, R, i):", None)]
    for k, ins in enumerate(body):
        names[f"f{k}"], names[f"n{k}"] = ins.does, ins
        names.update({f"c{k}_{j}": s for j, s in enumerate(ins.src) if not isinstance(s, int)})
        if ins.guard is None:
            lines.append((f" {statement(k, ins, whole)}", ins))
            continue
        guard = f"{'~' if ins.guard[1] else ''}R[{ins.guard[0]}]"
        if whole:
            lines += [
                (f" g = np.flatnonzero({guard})", ins),
                (" if len(g) == run.T:", ins),
                (f"  {statement(k, ins, True)}", ins),
                (" elif len(g):", ins),
                ("  i = g", ins),
                (f"  {statement(k, ins, False)}", ins),
            ]
        else:
            lines += [
                (f" h, i = i, i[{guard}[i]]", ins),
                (" if len(i):", ins),
                (f"  {statement(k, ins, False)}", ins),
                (" i = h", ins),
            ]
    text = "\n".join(line for line, _ in lines) + "\n return\n"
    exec(compile(text, "<block>", "exec"), names)
    return Code(names["block"], [ins for _, ins in lines if ins is not None])


def statement(k: int, ins: Instruction, whole: bool) -> str:
    """An instruction as Python."""
    operands = [
        (f"R[{s}]" if whole else f"R[{s}][i]") if isinstance(s, int) else f"c{k}_{j}" for j, s in enumerate(ins.src)
    ]
    before = ["run", "None" if whole else "i", f"n{k}"] if ins.acts else []
    call = f"f{k}({', '.join(before + operands)})"
    if not ins.out:
        return call
    if not whole:
        if len(ins.out) == 1:
            return f"put(R, {ins.out[0]}, i, {call})"
        return f"for o, v in zip({ins.out}, {call}): put(R, o, i, v)"
    if not ins.acts and not any(isinstance(s, int) for s in ins.src):
        call = f"[np.full(run.T, v) for v in {call}]" if len(ins.out) > 1 else f"np.full(run.T, {call})"
    return ", ".join("_" if o is None else f"R[{o}]" for o in ins.out) + " = " + call
