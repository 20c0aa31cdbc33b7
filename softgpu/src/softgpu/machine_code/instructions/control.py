"""Branches, calls, barriers of programs and of warps, and what needs nothing to be done here."""

from typing import Any

from softgpu.floats import Array
from softgpu.machine_code.operation import Operation, Row


def jump(op: Operation) -> None:
    """A branch, which may have a condition beside its guard, a call of a function of the assembler's, or the end."""
    *conditions, _ = op.args or [""]
    for text in conditions:
        op.ins.also = op.code.register(text.lstrip("!")), text.startswith("!")
    op.ins.end = "exit" if op.root == "EXIT" else "branch"
    op.ins.target = op.args[-1].strip("`()") if op.root != "EXIT" else ""


def back(op: Operation) -> None:
    """To the address that a register holds."""
    op.ins.end, op.ins.src = "return", [op.code.register(op.args[0].split()[0])]


def barrier(op: Operation) -> None:
    op.ins.end = "barrier"


def warps_barrier(op: Operation) -> None:
    """Threads that are expected wait here for one another."""
    op.ins.end, op.ins.src = "sync", [op.args[0] if op.root == "BSYNC" else "all"]


def expect(op: Operation) -> None:
    """Threads that will come to a barrier; BREAK: that won't."""
    name, comes = op.args[0], op.root == "BSSY"

    def note(run: Any, i: Array | None, ins: Any) -> None:
        run.expect(name, run.threads(i), comes)

    op.acts(note, [], [])


def ignored(op: Operation) -> None:
    """Fences and hints: here one instruction follows another."""


ROWS = [
    Row("BRA EXIT", "", jump),
    Row("CALL", "REL NOINC", jump),
    Row("RET", "REL NODEC", back),
    Row("BAR", "SYNC DEFER_BLOCKING", barrier),
    Row("BSYNC", "", warps_barrier),
    Row("WARPSYNC", "ALL", warps_barrier),
    Row("BSSY BREAK", "", expect),
    Row("NOP YIELD ERRBAR CGAERRBAR", "", ignored),
    Row("MEMBAR", "ALL SC GPU CTA SYS", ignored),
    Row("CCTL", "IVALL", ignored),
]
