"""Memory of three kinds: of all blocks that live (global), of each program (shared), of each thread (local).

Each has `view`, its bytes as an array of a type, and `locate`, which finds where in `view(uint8)` each thread's address
is, or raises: outside, or not aligned. `Global` notes which blocks a launch read and wrote.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from softgpu.floats import Array, i8, u1, u8
from softgpu.races import Shadow

FIRST = 16  # the first address in a view of all memory: NumPy takes none at 0
Blocks = Iterable[tuple[int, int]]
"""Addresses and sizes"""


class EmulatorError(Exception):
    """An instruction that isn't known, or that no GPU could run."""


class How(NamedTuple):
    """A read, a write, or one in an order that is nobody's race (`quiet`).

    `numbers`, each of type `kind`, are what a write puts side by side: one that changes nothing is no race.
    """

    write: bool
    quiet: bool = False
    numbers: Sequence[Array] = ()
    view: Array = None

    def changes(self, at: Array) -> Array:
        """Which threads change what is at their bytes, or might."""
        found = np.full(len(at), not self.numbers)
        for k, x in enumerate(self.numbers):
            found |= self.view[at // self.view.itemsize + k] != x
        return found


class Everything:
    """All addresses, as an array's interface."""

    def __init__(self, t: Any) -> None:
        self.__array_interface__ = {
            "data": (FIRST, False),
            "shape": ((1 << 47) // np.dtype(t).itemsize,),
            "typestr": np.dtype(t).str,
            "version": 3,
        }


class Global:
    """Blocks by address. `find_more` is asked for all living ones when an address is in none of those known.

    `read` and `written` are the addresses of blocks that were touched.
    """

    def __init__(self, known: Blocks = (), find_more: Callable[[], Blocks] | None = None, races: bool = True) -> None:
        self.find_more, self.races = find_more, races
        self.owners: Any = None  # what keeps the blocks alive, if anything has to
        self.views: dict[Any, Array] = {}
        self.shadows: dict[int, Shadow] = {}
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.add(known)

    def add(self, blocks: Blocks) -> None:
        for address, size in blocks:
            if size:
                self.sizes[address] = max(size, self.sizes.get(address, 0))
        self.starts = np.array(sorted(self.sizes), u8)
        self.ends = self.starts + np.array([self.sizes[s] for s in sorted(self.sizes)], u8)

    def view(self, t: Any) -> Array:
        """All of memory as an array of a type; only what `locate` found is ever read."""
        if t not in self.views:
            self.views[t] = np.asarray(Everything(t))
        return self.views[t]

    def locate(self, run: Any, threads: Array, ins: Any, address: Array, size: int, how: How) -> Array:
        aligned(run, threads, ins, address, size)
        block = self.block_of(run, threads, ins, address, size)
        touched = [block] if isinstance(block, int) else np.unique(block).tolist()
        (self.written if how.write else self.read).update(int(self.starts[each]) for each in touched)
        at = address.astype(i8) - FIRST
        if self.races and not how.quiet:
            changes = how.changes(at)
            for each in touched:
                start = int(self.starts[each])
                if start not in self.shadows or len(self.shadows[start].written) < self.sizes[start]:
                    self.shadows[start] = Shadow(self.sizes[start], True)
                mine = slice(None) if isinstance(block, int) else block == each
                spots = (address[mine] - u8(start)).astype(i8)
                self.shadows[start].touch(run, threads[mine], ins, spots, size, how.write, changes[mine])
        return at

    def block_of(self, run: Any, threads: Array, ins: Any, address: Array, size: int) -> Any:
        """The number of the block in which all addresses are, or of each one's."""
        low, high = address.min(), address.max()
        for complete in (self.find_more is None, True):
            k = int(np.searchsorted(self.starts, low, "right")) - 1
            if k >= 0 and high + u8(size) <= self.ends[k]:
                return k
            each = np.searchsorted(self.starts, address, "right").astype(i8) - 1
            outside = each < 0
            if len(self.starts):
                outside |= address + u8(size) > self.ends[np.maximum(each, 0)]
            if not outside.any():
                return each
            if not complete and self.find_more is not None:
                self.add(self.find_more())
        i = int(np.flatnonzero(outside)[0])
        raise run.error(ins, threads[i], f"{size} bytes at {int(address[i]):#x}, {self.nearest(int(address[i]))}")

    def nearest(self, address: int) -> str:
        """Where an address is, seen from the block that is nearest."""
        if not self.sizes:
            return "and there is no memory"
        start = min(self.sizes, key=lambda s: min(abs(address - s), abs(address - s - self.sizes[s])))
        return f"{address - start} bytes from the beginning of the nearest block, which has {self.sizes[start]}"


class Own:
    """Bytes of each program (shared memory) or thread (local), filled with ones: unwritten ones may hold anything."""

    def __init__(self, kind: str, count: int, size: int, races: bool = False) -> None:
        self.kind, self.limit, self.size = kind, size, -(-max(size, 16) // 16) * 16
        room = np.full(count * self.size + 16, 0xFF, u1)
        self.bytes = room[-room.ctypes.data % 16 :][: count * self.size]
        self.shadow = Shadow(len(self.bytes), False) if races else None

    def view(self, t: Any) -> Array:
        return self.bytes.view(t)

    def locate(self, run: Any, threads: Array, ins: Any, address: Array, size: int, how: How) -> Array:
        aligned(run, threads, ins, address, size)
        outside = (address.astype(i8) < 0) | (address.astype(i8) + size > self.limit)
        if outside.any():
            i = int(np.flatnonzero(outside)[0])
            raise run.error(ins, threads[i], f"{size} bytes at {int(address[i])} of {self.limit} of {self.kind} memory")
        at = address.astype(i8) + (run.program_of[threads] if self.kind == "shared" else threads) * self.size
        if self.shadow is not None and not how.quiet:
            self.shadow.touch(run, threads, ins, at, size, how.write, how.changes(at))
        return at


def aligned(run: Any, threads: Array, ins: Any, address: Array, size: int) -> None:
    off = address & address.dtype.type(size - 1) if size & size - 1 == 0 else address[:0]
    if off.any():
        i = int(np.flatnonzero(off)[0])
        raise run.error(ins, threads[i], f"{size} bytes at {int(address[i]):#x}, which isn't a multiple of them")
