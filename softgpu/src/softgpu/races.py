"""Races: two warps touch a byte, one of them writes, and no barrier stands between.

The threads of one warp go together here, and their order isn't in question. Nor is that of atomic accesses. In global
memory a program may write what another of its warps has read: where it has more threads than numbers, Triton lets
several read a number, and one of them write the result.
"""

from typing import Any

import numpy as np

from softgpu.floats import Array, i8

OTHER = 0x80
"""A bit that no number of a warp has"""


class Shadow:
    """Who wrote and who read each byte last: program, number of barriers so far, warp, as one number."""

    def __init__(self, size: int, of_all: bool) -> None:
        self.of_all = of_all  # programs
        self.written, self.read = np.zeros(size, i8), np.zeros(size, i8)
        self.several = np.zeros(size, bool)  # warps have read it since the barrier

    def touch(self, run: Any, threads: Array, ins: Any, at: Array, width: int, write: bool, changes: Array) -> None:
        """Report what these accesses race with; note them."""
        who = np.broadcast_to(run.who(threads)[:, None], (len(at), width))
        spots = at[:, None] + np.arange(width)
        if write:
            read = self.read[spots]
            also = self.several[spots] & (read >> 8 == who >> 8)  # another warp, too
            self.report(run, threads, ins, who, self.written[spots], changes, "write after a write")
            read = np.where(also, read ^ OTHER, read)
            read = np.where(read >> 40 == who >> 40, 0, read) if self.of_all else read
            self.report(run, threads, ins, who, read, changes, "write after a read")
            self.written[spots] = who
        else:
            self.report(run, threads, ins, who, self.written[spots], changes, "read after a write")
            self.several[spots] = (self.read[spots] != who) & (self.read[spots] >> 8 == who >> 8)
            self.read[spots] = who

    def report(self, run: Any, threads: Array, ins: Any, who: Array, other: Array, changes: Array, what: str) -> None:
        same_program = other >> 40 == who >> 40
        clash = (other != 0) & (other != who) & (~same_program | (other >> 8 == who >> 8)) & changes[:, None]
        if clash.any():
            i, j = (int(each[0]) for each in np.nonzero(clash))
            by = int(other[i, j])
            whose = f"warp {by & OTHER - 1} of its program" if same_program[i, j] else f"program {(by >> 40) - 1}"
            run.race(ins, threads[i], f"{what} by {whose}, with no barrier between")
