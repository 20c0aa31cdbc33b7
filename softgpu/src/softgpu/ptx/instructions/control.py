"""Branches, ends, barriers of programs, and what needs nothing to be done here."""

from typing import Any

from softgpu.memory import EmulatorError
from softgpu.ptx.operation import Operation, Row


def jump(op: Operation) -> None:
    op.ins.end = {"bra": "branch", "ret": "exit", "exit": "exit"}[op.root]
    op.ins.target = op.args[0] if op.root == "bra" else ""


def barrier(op: Operation) -> None:
    """Of all threads of a program."""
    if op.args != ["0"]:
        raise EmulatorError("only the barrier 0 of all threads is known")
    op.ins.end = "barrier"


def ignored(op: Operation) -> None:
    """Fences, hints, waits for other kernels: here one instruction follows another."""


def policy(op: Operation) -> None:
    op.args = [op.args[0], "0"]
    op.computes(lambda x: x)


def stops(op: Operation) -> None:
    """A trap, or a function of the device: an assertion that failed."""

    def stop(run: Any, i: Any, ins: Any) -> None:
        raise run.error(ins, run.threads(i)[0], "an assertion failed, or a function of the device is called")

    op.acts(stop, [])


FENCES = "sc acq_rel acquire release cta gpu sys cluster gl global shared proxy async"
ROWS = [
    Row("bra ret exit", "", "uni", jump),
    Row("bar barrier", "", "sync cta aligned", barrier),
    Row("bar", "", "warp sync", ignored),
    Row("fence membar", "", FENCES, ignored),
    Row("prefetch discard nanosleep", "", "global L1 L2 u32", ignored),
    Row("griddepcontrol", "", "wait launch_dependents", ignored),
    Row("createpolicy", "b64", "fractional L2::evict_first L2::evict_last L2::evict_normal", policy),
    Row("trap call", "", "uni", stops),
]
