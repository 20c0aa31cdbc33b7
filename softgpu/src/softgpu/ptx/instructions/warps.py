"""What the threads of a warp do together: exchange numbers, vote, reduce."""

from functools import partial
from typing import Any

import numpy as np

from softgpu.floats import UFUNCS, Array, extreme, i8, u4
from softgpu.ptx.operation import TYPES, Operation, Row


def sources(lane: Array, how: str, b: Array, c: Array) -> tuple[Array, Array]:
    """From which lane each lane reads, and whether that is in its segment."""
    b, clamp, segment = b.astype(i8) & 31, c.astype(i8) & 31, c.astype(i8) >> 8 & 31
    bottom, top = lane & segment, (lane & segment) | (clamp & ~segment)
    at = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": bottom | (b & ~segment)}[how]
    valid = at >= top if how == "up" else at <= top
    return np.where(valid, at, lane), valid


def exchanged(run: Any, i: Array | None, ins: Any, how: str, a: Array, b: Array, c: Array) -> list[Array]:
    """Each thread's number from another lane, and whether that is in its segment."""
    threads = run.threads(i)
    lane, valid = sources((threads & 31).astype(i8), how, b, c)
    return [run.everywhere(i, run.spread(a, i), ins, (threads & ~31) + lane), run.spread(valid, i)]


def exchange(op: Operation) -> None:
    outs, how = op.args[0].split("|"), op.one_of("up down bfly idx")

    def shuffle(run: Any, i: Array | None, ins: Any, a: Array, b: Array, c: Array, mask: Array) -> Any:
        found = exchanged(run, i, ins, how, a, b, c)
        return found if len(outs) == 2 else found[0]

    op.acts(shuffle, outs, *((each, "b32") for each in op.args[1:]))


def whole_warps(run: Any, i: Array | None, ins: Any) -> None:
    if i is not None and len(i) % 32:
        raise run.error(ins, i[0], "a warp works together whose threads aren't all there")


def reduce(op: Operation) -> None:
    name, kind = op.one_of("add min max and or xor"), TYPES[op.t]
    fn = partial(extreme, largest=name == "max", nan=op.has("NaN")) if op.t == "f32" else UFUNCS[name]

    def all_lanes(run: Any, i: Array | None, ins: Any, a: Array, mask: Array) -> Array:
        whole_warps(run, i, ins)
        rows = np.ascontiguousarray(run.spread(a, i)).view(kind).reshape(-1, 32)
        rows = abs(rows) if op.has("abs") else rows
        found = rows[:, 0]
        for lane in range(1, 32):
            found = fn(found, rows[:, lane])
        return np.repeat(found, 32).view(u4)

    op.acts(all_lanes, op.args[:1], (op.args[1], op.t), (op.args[2], "b32"))


def vote(op: Operation) -> None:
    negated, how = op.args[1].startswith("!"), op.one_of("ballot any all uni")

    def count(run: Any, i: Array | None, ins: Any, p: Array, mask: Array) -> Array:
        votes = run.ballot(i, run.spread(p, i) ^ negated)
        everyone = run.ballot(i, np.ones(run.count(i), bool))
        if how == "ballot":
            return votes
        return votes != 0 if how == "any" else (votes == everyone) | ((votes == 0) & (how == "uni"))

    op.acts(count, op.args[:1], (op.args[1].lstrip("!"), "pred"), (op.args[2], "b32"))


ROWS = [
    Row("shfl", "b32", "sync up down bfly idx", exchange),
    Row("redux", "s32 u32 b32 f32", "sync add min max and or xor abs NaN", reduce),
    Row("vote", "b32 pred", "sync ballot any all uni", vote),
]
