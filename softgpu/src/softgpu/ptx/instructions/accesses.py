"""Memory: loads, stores, atomic changes, matrices of a warp."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from softgpu import floats
from softgpu.floats import Array, extreme, i8, u2, u4, u8
from softgpu.memory import EmulatorError, How
from softgpu.program import UNSIGNED
from softgpu.ptx.operation import PACKED, TYPES, Operation, Row, as_register, group, size_of

ORDERED = ("volatile", "acquire", "release", "relaxed", "acq_rel")


class Place:
    """[register + offset] of a space: shared, local, or global, which is what an address without a space means."""

    def __init__(self, text: str, space: str) -> None:
        found = re.fullmatch(r"\[\s*([%\w$.]+?)\s*(?:\+\s*(-?\w+)|(-\d+))?\s*\]", text)
        if found is None:
            raise EmulatorError(f"no address is known of the form {text}")
        self.base, self.offset, self.space = found[1], int(found[2] or found[3] or "0", 0), space
        self.t = "u64" if space == "global" else "u32"

    def of(self, x: Array) -> Array:
        return x.astype(u8) + u8(self.offset & (1 << 64) - 1) if self.space == "global" else x.astype(i8) + self.offset


def space_of(op: Operation) -> str:
    names = [each.split("::")[0] for each in op.modifiers]
    return next((each for each in names if each in ("param", "shared", "local")), "global")


def parameter(op: Operation, base: str, offset: int) -> None:
    """What the kernel was called with."""
    outs, kind = group(op.args[0]), UNSIGNED[size_of(op.t)]
    at = op.kernel.symbols[base] + offset
    width = op.width(outs)
    spots = [slice(at + k * kind().itemsize, at + (k + 1) * kind().itemsize) for k in range(len(outs))]

    def load(run: Any, i: Array | None, ins: Any) -> Any:
        found = [np.full(run.count(i), run.param[each].view(kind)[0].astype(UNSIGNED[width])) for each in spots]
        return found if len(found) > 1 else found[0]

    op.acts(load, outs)


def load(op: Operation) -> None:
    space, outs = space_of(op), group(op.args[0])
    place = Place(op.args[1], space)
    if space == "param":
        return parameter(op, place.base, place.offset)
    kind, quiet = np.dtype(UNSIGNED[size_of(op.t)]), any(map(op.has, ORDERED))
    size, width = kind.itemsize, op.width(outs)
    signed = np.dtype(TYPES[op.t]) if op.t[0] == "s" else kind

    def fetch(run: Any, i: Array | None, ins: Any, a: Array, *_: Array) -> Any:
        memory, where = run.spaces[space], place.of(run.spread(a, i))
        at = memory.locate(run, run.threads(i), ins, where, size * len(outs), How(False, quiet)) // size
        view = memory.view(kind.type)
        found = [as_register(view[at + k].view(signed), width) for k in range(len(outs))]
        return found if len(outs) > 1 else found[0]

    op.acts(fetch, outs, (place.base, place.t))


def store(op: Operation) -> None:
    space, kind, quiet = space_of(op), UNSIGNED[size_of(op.t)], any(map(op.has, ORDERED))
    place, size, values = Place(op.args[0], space), size_of(op.t), group(op.args[1])

    def write(run: Any, i: Array | None, ins: Any, a: Array, *xs: Array) -> None:
        memory, threads, where = run.spaces[space], run.threads(i), place.of(run.spread(a, i))
        numbers = [run.spread(x.view(UNSIGNED[x.dtype.itemsize]).astype(kind), i) for x in xs]
        view = memory.view(kind)
        how = How(True, quiet, numbers, view)
        at = memory.locate(run, threads, ins, where, size * len(values), how) // size
        for k, x in enumerate(numbers):
            view[at + k] = x
        lost = np.zeros(len(at), bool)
        for k, x in enumerate(numbers):
            lost |= view[at + k] != x
        if lost.any():
            run.race(ins, threads[int(np.flatnonzero(lost)[0])], "threads write different numbers to one place at once")

    op.acts(write, [], (place.base, place.t), *((each, op.t) for each in values))


CHANGES: dict[str, Callable[..., Array]] = floats.UFUNCS | {
    "exch": lambda old, new: new,
    "inc": lambda old, top: np.where(old >= top, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, top: np.where((old == 0) | (old > top), top, old - old.dtype.type(1)),
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}


def change_of(op: Operation) -> Callable[..., Array]:
    """What an atomic instruction makes of the old number and its operands, as numbers of the type."""
    name, form = op.one_of(" ".join(CHANGES)), PACKED.get(op.t, op.t)
    if form[0] not in "fb" or (form[1:].isdigit() and form[0] == "b"):
        return CHANGES[name]
    fn = np.add if name == "add" else partial(extreme, largest=name == "max")
    if form in ("f32", "f64"):
        return fn if name in ("add", "min", "max") else CHANGES[name]

    def narrow(*xs: Array) -> Array:
        return floats.narrow(fn(*(floats.widen(x, form) for x in xs)), form)

    return floats.pairwise(narrow) if op.t in PACKED else narrow


def atomic(op: Operation) -> None:
    """One thread after the other, in the order of their numbers, where they change one place."""
    space, kind, change = space_of(op), TYPES[op.t], change_of(op)
    outs = group(op.args[0]) if op.root == "atom" else []
    address, *values = op.args[op.root == "atom" :]
    place, size, several = Place(address, space), size_of(op.t), [group(each) for each in values]

    def at_once(run: Any, i: Array | None, ins: Any, a: Array, *xs: Array) -> Any:
        memory, width = run.spaces[space], len(several[0])
        spots = memory.locate(run, run.threads(i), ins, place.of(run.spread(a, i)), size, How(True, True)) // size
        numbers = [run.spread(x, i).view(kind) for x in xs]
        found = [in_turn(memory.view(kind), spots + k, change, *numbers[k::width]) for k in range(width)]
        found = [each.view(UNSIGNED[size]) for each in found[: len(outs)]]
        return found if len(outs) > 1 else found[0] if outs else None

    op.acts(at_once, outs, (place.base, place.t), *((each, op.t) for many in several for each in many))


def in_turn(view: Array, spots: Array, change: Callable[..., Array], *xs: Array) -> Array:
    """Change what is at each thread's spot, one thread after the other; the old numbers."""
    old, turns = np.empty(len(spots), view.dtype), turns_at(spots)
    for turn in range(int(turns.max()) + 1):
        who = np.flatnonzero(turns == turn)
        old[who] = view[spots[who]]
        view[spots[who]] = change(old[who], *(x[who] for x in xs))
    return old


def turns_at(spots: Array) -> Array:
    """For each thread, how many of lower numbers go to the same spot."""
    order = np.argsort(spots, kind="stable")
    first = np.concatenate([[0], np.flatnonzero(np.diff(spots[order])) + 1])
    turns = np.empty(len(spots), i8)
    turns[order] = np.arange(len(spots)) - np.repeat(first, np.diff(np.concatenate([first, [len(spots)]])))
    return turns


def matrix_rows(run: Any, i: Array | None, ins: Any, address: Array, count: int, write: bool) -> Array:
    """Where the rows of a warp's matrices of 8 x 8 numbers lie: (warps, matrices, 8, 8) places of 16 bits.

    Each of the first 8 * count threads has the address of a row of 16 bytes.
    """
    threads = run.threads(i)
    if len(threads) % 32:
        raise run.error(ins, threads[0], "a matrix in a warp whose threads aren't all there")
    used = threads % 32 < 8 * count
    rows = run.spaces["shared"].locate(run, threads[used], ins, run.spread(address, i)[used], 16, How(write))
    return rows.reshape(-1, count, 8, 1) // 2 + np.arange(8)


def load_tiles(run: Any, i: Array | None, ins: Any, address: Array, count: int, turned: bool) -> Any:
    """Matrices of a warp; each thread gets two numbers of each in a register."""
    tiles = run.spaces["shared"].view(u2)[matrix_rows(run, i, ins, address, count, False)].astype(u4)
    tiles = tiles.swapaxes(2, 3) if turned else tiles
    found = [(tiles[:, j, :, 0::2] | tiles[:, j, :, 1::2] << u4(16)).reshape(-1) for j in range(count)]
    return found if count > 1 else found[0]


def store_tiles(run: Any, i: Array | None, ins: Any, address: Array, numbers: Sequence[Array], turned: bool) -> None:
    rows = matrix_rows(run, i, ins, address, len(numbers), True)
    for j, x in enumerate(numbers):
        tiles = np.ascontiguousarray(run.spread(x, i)).view(u2).reshape(-1, 8, 8)
        run.spaces["shared"].view(u2)[rows[:, j]] = tiles.swapaxes(1, 2) if turned else tiles


def load_matrix(op: Operation) -> None:
    outs, place, turned = group(op.args[0]), Place(op.args[1], "shared"), op.has("trans")
    op.acts(lambda run, i, ins, a: load_tiles(run, i, ins, place.of(a), len(outs), turned), outs, (place.base, "u32"))


def store_matrix(op: Operation) -> None:
    values, place, turned = group(op.args[1]), Place(op.args[0], "shared"), op.has("trans")
    registers = (place.base, "u32"), *((each, "b32") for each in values)
    op.acts(lambda run, i, ins, a, *xs: store_tiles(run, i, ins, place.of(a), xs, turned), [], *registers)


ANY = "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64 f16x2 bf16x2"
ORDER = "volatile acquire release relaxed acq_rel gpu sys cta weak"
L1 = "L1::evict_first L1::evict_last L1::evict_normal L1::no_allocate"
HINTS = f"nc {L1} L2::cache_hint L2::128B L2::256B ca cg cs lu wb wt"
CACHED = f"global param shared local const shared::cta {ORDER} {HINTS} v2 v4 v8"
ATOMS = "global shared gpu cta sys relaxed acquire release acq_rel noftz v2 v4 v8 L2::cache_hint"
ROWS = [
    Row("ld ldu", ANY, CACHED, load),
    Row("st", ANY, CACHED, store),
    Row("atom red", "u32 s32 b32 u64 s64 b64 f32 f64 f16 bf16 f16x2 bf16x2", f"{ATOMS} {' '.join(CHANGES)}", atomic),
    Row("ldmatrix", "b16", "sync aligned m8n8 x1 x2 x4 trans shared", load_matrix),
    Row("stmatrix", "b16", "sync aligned m8n8 x1 x2 x4 trans shared", store_matrix),
]
