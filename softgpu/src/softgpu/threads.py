"""Threads: some programs of a grid at once, all their threads as one array; who goes next, who waits for whom.

Threads that stand at the lowest basic block go on first, so those that a branch parted meet again where they should.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from softgpu.floats import Array, i8, u1, u4
from softgpu.memory import EmulatorError, Global, Own
from softgpu.program import UNSIGNED, Instruction, Program

Grid = Sequence[int]


AT_ONCE = 4096
"""Threads that run together; more take less time for each, and see later that another program failed."""
TOGETHER = "bar.sync 0"
"""The barrier of a whole program; others have names in machine code, and are a warp's."""


class Race(EmulatorError):
    """Two warps or programs touched one place, and one of them wrote."""


class Launch:
    """A launch: `values` are the bytes of each parameter, `shared` those of shared memory that Triton asked for.

    Then `memory` says which blocks were read and written. Raises for what no GPU could run, and for races, unless
    `memory.races` is False.
    """

    def __init__(self, program: Program, grid: Grid, values: Sequence[bytes], memory: Global, shared: int = 0) -> None:
        self.program, self.grid, self.memory = program, [*grid, 1, 1][:3], memory
        self.shared, self.seen = max(shared, program.shared_size), dict[str, int]()
        self.param = np.zeros(program.param_bytes + 16, u1)
        for (_, at, size), value in zip(program.params, values, strict=True):
            self.param[at : at + size] = np.frombuffer(value, u1)
        memory.add((data.ctypes.data, data.nbytes) for data in program.constants)
        count, step = int(np.prod(self.grid)), max(1, AT_ONCE // program.threads)
        for first in range(0, count, step):
            Run(self, np.arange(first, min(count, first + step))).go()
        if self.seen:
            raise Race("; ".join(f"{text} (first in program {at})" for text, at in self.seen.items()))


class Run:
    """Some programs of a grid, by their numbers; `T` threads in all, `R` their registers."""

    def __init__(self, launch: Launch, programs: Array) -> None:
        self.launch, self.program, self.programs = launch, launch.program, programs
        self.per_program, self.param = launch.program.threads, launch.param
        self.T = len(programs) * self.per_program
        self.everyone = np.arange(self.T)
        self.program_of, self.thread = self.everyone // self.per_program, self.everyone % self.per_program
        number, (x, y, _) = programs[self.program_of], launch.grid
        self.ids = {"x": number % x, "y": number // x % y, "z": number // (x * y)}
        self.barriers = np.zeros(len(programs), i8)
        self.spaces: dict[str, Any] = {
            "global": launch.memory,
            "shared": Own("shared", len(programs), launch.shared, launch.memory.races),
            "local": Own("local", self.T, launch.program.local_size),
        }
        self.R = [np.zeros(self.T, UNSIGNED[w] if w else np.bool_) for w in launch.program.widths]
        for name, at in launch.program.specials.items():
            value = np.broadcast_to(launch.program.special_value(self, name), self.T)
            self.R[at] = value.astype(self.R[at].dtype)
        self.pending: dict[int, list[Array]] = {0: [self.everyone]}
        self.alive = np.ones(self.T, bool)
        self.members: dict[str, Array] = {}  # of a warp's barrier: who is expected there
        self.arrived: dict[str, Array] = {}  # and who waits at a barrier, until it goes on at which block

    # What instructions ask for. `i` is the numbers of the threads, or None for all.

    def count(self, i: Array | None) -> int:
        return self.T if i is None else len(i)

    def threads(self, i: Array | None) -> Array:
        return self.everyone if i is None else i

    def spread(self, x: Array, i: Array | None) -> Array:
        return np.broadcast_to(x, self.count(i))

    def who(self, threads: Array) -> Array:
        """Program, barriers, warp, as one number; see `races.Shadow`."""
        at = self.program_of[threads]
        return (self.programs[at] + 1 << 40) | (self.barriers[at] << 8) | (self.thread[threads] // 32)

    def everywhere(self, i: Array | None, values: Array, ins: Instruction, source: Array) -> Array:
        """What threads `source` hold, who must be there."""
        if i is None:
            return values[source]
        found, there = np.zeros(self.T, values.dtype), np.zeros(self.T, bool)
        found[i], there[i] = values, True
        if not there[source].all():
            self.race(ins, i[int(np.argmin(there[source]))], "read from a thread that isn't there")
        return found[source]

    def ballot(self, i: Array | None, votes: Array) -> Array:
        """Of each thread's warp, who votes for it, as bits."""
        all_votes = np.zeros(self.T, u4)
        all_votes[self.threads(i)] = votes
        words = (all_votes.reshape(-1, 32) << np.arange(32, dtype=u4)).sum(1, dtype=u4)
        return np.repeat(words, 32)[self.threads(i)]

    # What is said about an instruction.

    def place(self, ins: Instruction) -> str:
        source = f"{ins.source[0].rsplit('/', 1)[-1]}:{ins.source[1]}, " if ins.source else ""
        return f"{self.program.name} ({source}line {ins.line}: {ins.text})"

    def error(self, ins: Instruction, thread: int, text: str) -> EmulatorError:
        program = self.programs[self.program_of[thread]]
        return EmulatorError(f"{self.place(ins)}, program {program} thread {self.thread[thread]}: {text}")

    def race(self, ins: Instruction, thread: int, text: str) -> None:
        program = self.programs[self.program_of[thread]]
        said = f"{self.place(ins)}: {text}"
        if said not in self.launch.seen:
            self.launch.seen[said] = int(program)

    # Who goes next.

    def go(self) -> None:
        """Run until all threads have ended."""
        with np.errstate(all="ignore"):
            while self.pending:
                number = min(self.pending)
                parts = self.pending.pop(number)
                i = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
                if number == len(self.program.blocks):
                    self.end(i)
                else:
                    self.step(number, i)
        if any((waits >= 0).any() for waits in self.arrived.values()):
            raise EmulatorError(f"{self.program.name}: threads wait at a barrier that others never reach")

    def step(self, number: int, i: Array) -> None:
        """A basic block, and where its threads go then."""
        block = self.program.blocks[number]
        code = block.code(len(i) == self.T)
        try:
            code.run(self, self.R, i)
        except EmulatorError:
            raise
        except Exception as error:
            trace = sys.exc_info()[2]
            line = trace.tb_next.tb_lineno if trace is not None and trace.tb_next is not None else 2
            raise EmulatorError(f"{self.place(code.lines[line - 2])}: {error!r}") from error
        end = block.end
        if end is None:
            return self.send(block.following, i)
        conditions = [self.R[at][i] ^ negated for at, negated in filter(None, (end.guard, end.also))]
        if conditions:
            chosen = np.logical_and.reduce(conditions)
            self.send(block.following, i[~chosen])
            i = i[chosen]
            if not len(i):
                return
        if end.end == "branch":
            self.send(block.target, i)
        elif end.end == "exit":
            self.end(i)
        elif end.end == "barrier":
            if len(i) == self.T:
                self.barriers += 1
                return self.send(block.following, i)
            self.arrive(TOGETHER, i, block.following)
        elif end.end == "return":
            for start in np.unique(self.R[end.src[0]][i]):
                self.send(self.program.block_at(int(start)), i[self.R[end.src[0]][i] == start])
        else:  # a barrier of warps
            self.arrive(end.src[0], i, block.following)

    def expect(self, barrier: str, threads: Array, here: bool) -> None:
        """A barrier of warps waits for these threads from now on, or no longer."""
        self.members.setdefault(barrier, np.zeros(self.T, bool))[threads] = here
        if not here:
            self.meet(barrier)

    def arrive(self, barrier: str, i: Array, following: int) -> None:
        self.arrived.setdefault(barrier, np.full(self.T, -1))[i] = following
        self.meet(barrier)

    def meet(self, barrier: str) -> None:
        """Let warps, or programs, go on of which all expected threads have arrived."""
        arrived = self.arrived.setdefault(barrier, np.full(self.T, -1))
        waiting, expected = arrived >= 0, self.members.get(barrier, True) & self.alive
        size = self.per_program if barrier == TOGETHER else 32
        due = waiting.reshape(-1, size).any(1) & ~(expected & ~waiting).reshape(-1, size).any(1)
        if barrier == TOGETHER:
            self.barriers[due] += 1
        go = np.flatnonzero(np.repeat(due, size) & waiting)
        for block in np.unique(arrived[go]):
            self.send(int(block), go[arrived[go] == block])
        arrived[go] = -1
        if barrier in self.members:
            self.members[barrier][go] = False

    def send(self, block: int, threads: Array) -> None:
        if len(threads):
            self.pending.setdefault(block, []).append(threads)

    def end(self, i: Array) -> None:
        self.alive[i] = False
        for barrier in self.arrived:
            self.meet(barrier)
