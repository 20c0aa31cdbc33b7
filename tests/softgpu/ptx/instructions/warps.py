"""What the threads of a warp do together: exchange numbers, vote, reduce, multiply matrices."""

from functools import partial
from typing import Any

import numpy as np

from tests.softgpu.floats import UFUNCS, Array, canonical, extreme, f4, f8, i8, u1, u2, u4, widen
from tests.softgpu.memory import EmulatorError
from tests.softgpu.ptx.operation import TYPES, Operation, Row, group


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


def active(op: Operation) -> None:
    op.acts(lambda run, i, ins: run.ballot(i, np.ones(run.count(i), bool)), op.args[:1])


def elect(op: Operation) -> None:
    """The lowest lane that is there."""

    def choose(run: Any, i: Array | None, ins: Any, mask: Array) -> list[Array]:
        there = run.ballot(i, np.ones(run.count(i), bool))
        first = np.log2((there & (~there + u4(1))).astype(f8)).astype(u4)
        return [first, first == run.threads(i) % 32]

    op.acts(choose, op.args[0].split("|"), (op.args[1], "b32"))


SHAPES = "m16n8k4 m16n8k8 m16n8k16 m16n8k32"
PER_REGISTER = {"f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4, "tf32": 1}


def multiply(op: Operation) -> None:
    """A product of matrices of a warp, (16, k) by (k, 8), and a sum: float64 here, rounded to float32 once."""
    shape = op.one_of(SHAPES)
    of = "tf32" if op.has("tf32") else op.kinds[1]
    if op.kinds[0] != "f32" or of not in PER_REGISTER or not op.has("row"):
        raise EmulatorError("only products of 16-bit, 8-bit and TF32 numbers with float32 sums are known")
    d, a, b, c = (group(each) for each in op.args)
    per, depth = PER_REGISTER[of], int(shape.rpartition("k")[2])
    lane = np.arange(32)
    g, q = lane // 4, lane % 4

    def numbers(x: Array) -> Array:
        if of == "tf32":
            return (x & u4(0xFFFFE000)).view(f4).reshape(-1, 32, 1).astype(f8)
        return widen(np.ascontiguousarray(x).view(u2 if per == 2 else u1), of).reshape(-1, 32, per).astype(f8)

    def product(run: Any, i: Array | None, ins: Any, *registers: Array) -> list[Array]:
        whole_warps(run, i, ins)
        xs, warps = [run.spread(x, i) for x in registers], run.count(i) // 32
        left, right = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
        for r, e in np.ndindex(len(a), per):
            left[:, g + 8 * (r % 2), q * per + e + 4 * per * (r // 2)] = numbers(xs[r])[:, :, e]
        for r, e in np.ndindex(len(b), per):
            right[:, q * per + e + 4 * per * r, g] = numbers(xs[len(a) + r])[:, :, e]
        total = left @ right
        sums = [x.view(f4).reshape(-1, 32) for x in xs[len(a) + len(b) :]]
        return [
            canonical((total[:, g + 8 * (r // 2), 2 * q + r % 2] + sums[r]).astype(f4).reshape(-1)) for r in range(4)
        ]

    op.acts(product, d, *((each, "b32") for each in (*a, *b, *c)))


ROWS = [
    Row("shfl", "b32", "sync up down bfly idx", exchange),
    Row("redux", "s32 u32 b32 f32", "sync add min max and or xor abs NaN", reduce),
    Row("vote", "b32 pred", "sync ballot any all uni", vote),
    Row("activemask", "b32", "", active),
    Row("elect", "", "sync", elect),
    Row("mma", "f32", f"{SHAPES} sync aligned row col tf32", multiply, "f16 bf16 e4m3 e5m2 f32", approximate=True),
]
