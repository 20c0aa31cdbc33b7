"""Memory, and what the threads of a warp do together."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from softgpu.floats import UFUNCS, Array, i4, i8, u4, u8
from softgpu.machine_code.operation import Operation, Row
from softgpu.memory import EmulatorError, How
from softgpu.program import UNSIGNED
from softgpu.ptx.instructions.accesses import CHANGES, in_turn, load_tiles, store_tiles
from softgpu.ptx.instructions.warps import exchanged

SHARED = 0x400  # where a program's own shared memory begins


def place_of(text: str, space: str) -> tuple[list[tuple[str, str]], Callable[..., Array]]:
    """[R1.64 + UR2 + 0x10] as operands, and the address that they make."""
    inside, operands, scales, offset = text[text.rindex("[") + 1 : -1], [], [], 0
    for term in re.sub(r"\+-", "+~", inside).split("+"):
        if found := re.fullmatch(r"(~?)(0x[0-9a-f]+)", term):
            offset += int(found[2], 16) * (-1 if found[1] else 1)
        elif found := re.fullmatch(r"(U?R\d+|U?RZ)(\.64)?(?:\.X(\d+))?", term):
            operands.append((found[1], "l" if found[2] else "i"))
            scales.append(int(found[3] or 1))
        else:
            raise EmulatorError(f"no address is known of the form {text}")

    def address(*xs: Array) -> Array:
        total = u8(offset & (1 << 64) - 1)
        for x, scale in zip(xs, scales, strict=True):
            total = total + x.astype(u8) * u8(scale)
        return total if space == "global" else (total & u8(0xFFFFFFFF)).astype(i8) - SHARED

    return operands, address


def size_of(op: Operation) -> tuple[int, bool]:
    """Bytes that are moved, and whether a narrow number's sign is extended."""
    width = op.one_of("U8 S8 U16 S16 64 128", "32")
    return int(width.lstrip("US")) // 8, width[0] == "S"


def load(op: Operation) -> None:
    space, quiet = "shared" if op.root == "LDS" else "global", op.has("STRONG")
    (size, signed), (operands, address) = size_of(op), place_of(op.args[1], space)
    unit, count = min(size, 4), max(size // 4, 1)

    def fetch(run: Any, i: Array | None, ins: Any, *xs: Array) -> Any:
        memory, where = run.spaces[space], run.spread(address(*xs), i)
        at = memory.locate(run, run.threads(i), ins, where, size, How(False, quiet)) // unit
        found = [memory.view(UNSIGNED[unit])[at + k] for k in range(count)]
        words = [x.view(f"i{unit}").astype(i4).view(u4) if signed else x.astype(u4) for x in found]
        return words if count > 1 else words[0]

    op.acts(fetch, registers(op.args[0], count), operands)


def store(op: Operation) -> None:
    space, quiet = "shared" if op.root == "STS" else "global", op.has("STRONG")
    (size, _), (operands, address) = size_of(op), place_of(op.args[0], space)
    unit, count = min(size, 4), max(size // 4, 1)

    def write(run: Any, i: Array | None, ins: Any, *xs: Array) -> None:
        memory, where = run.spaces[space], run.spread(address(*xs[count:]), i)
        view = memory.view(UNSIGNED[unit])
        numbers = [run.spread(x, i).astype(UNSIGNED[unit]) for x in xs[:count]]
        at = memory.locate(run, run.threads(i), ins, where, size, How(True, quiet, numbers, view)) // unit
        for k, x in enumerate(numbers):
            view[at + k] = x

    op.acts(write, [], [*registers(op.args[1], count), *operands])


def spill(op: Operation) -> None:
    """What a thread has no register for: words at fixed places of its stack, which are kept as registers are."""
    loads, count = op.root == "LDL", int(op.one_of("64 128", "32")) // 32
    found = re.fullmatch(r"\[R1(?:\+0x([0-9a-f]+))?\]", op.args[loads])
    if found is None:
        raise EmulatorError(f"no place of a thread's stack is known of the form {op.args[loads]}")
    own, words = registers(op.args[not loads], count), registers(f"L{int(found[1] or '0', 16) // 4}", count)

    def move(run: Any, i: Array | None, ins: Any, *xs: Array) -> Any:
        return [run.spread(x, i) for x in xs] if count > 1 else run.spread(xs[0], i)

    op.acts(move, *((own, words) if loads else (words, own)))


def registers(first: str, count: int) -> list[tuple[str, str]]:
    """Some registers in a row."""
    if first[-1] == "Z":
        return [(first, "i")] * count
    kind, number = re.fullmatch(r"(U?R|L)(\d+)", first).groups()
    return [(f"{kind}{int(number) + k}", "i") for k in range(count)]


def matrix(op: Operation) -> None:
    """Matrices of 8 x 8 numbers of 16 bits, from shared memory or to it."""
    count, stores, turned = int(op.one_of("1 2 4", "1")), op.root == "STSM", op.has("MT88")
    operands, address = place_of(op.args[not stores], "shared")
    numbers = registers(op.args[stores], count)

    def move(run: Any, i: Array | None, ins: Any, *xs: Array) -> Any:
        if stores:
            return store_tiles(run, i, ins, address(*xs[count:]), xs[:count], turned)
        return load_tiles(run, i, ins, address(*xs), count, turned)

    op.acts(move, [] if stores else numbers, [*numbers, *operands] if stores else operands)


def atomic(op: Operation) -> None:
    """One thread after the other where they change one place; the old number is returned."""
    change, t = CHANGES[op.one_of("ADD MIN MAX AND OR XOR EXCH").lower()], i4 if op.has("S32") else u4
    operands, address = place_of(op.args[-2], "global")

    def at_once(run: Any, i: Array | None, ins: Any, x: Array, *xs: Array) -> Any:
        memory, numbers = run.spaces["global"], run.spread(x, i).view(t)
        where = run.spread(address(*xs), i)
        spots = memory.locate(run, run.threads(i), ins, where, 4, How(True, True)) // 4
        old = in_turn(memory.view(t), spots, change, numbers)
        return [np.ones(len(old), bool), old] if len(op.args) == 4 else None

    outs = [(op.args[0], "p"), (op.args[1], "i")] if len(op.args) == 4 else []
    op.acts(at_once, outs, [(op.args[-1], "i"), *operands])


def exchange(op: Operation) -> None:
    how = {"UP": "up", "DOWN": "down", "BFLY": "bfly", "IDX": "idx"}[op.modifiers[0]]

    def shuffle(run: Any, i: Array | None, ins: Any, a: Array, b: Array, c: Array) -> list[Array]:
        return exchanged(run, i, ins, how, a, b, c)[::-1]

    op.acts(shuffle, [(op.args[0], "p"), (op.args[1], "i")], [(each, "i") for each in op.args[2:]])


def reduce(op: Operation) -> None:
    """Of those of a warp that are there."""
    fn, t = UFUNCS[{"SUM": "add"}.get(op.modifiers[0], op.modifiers[0].lower())], i4 if op.has("S32") else u4

    def all_there(run: Any, i: Array | None, ins: Any, a: Array) -> Array:
        first = np.concatenate([[0], np.flatnonzero(np.diff(run.threads(i) // 32)) + 1])
        found = fn.reduceat(run.spread(a, i).view(t), first, dtype=t)
        return np.repeat(found, np.diff([*first, run.count(i)]))

    op.acts(all_there, [(op.args[0], "i")], [(op.args[1], "i")])


def vote(op: Operation) -> None:
    def count(run: Any, i: Array | None, ins: Any, p: Array) -> list[Array]:
        votes = run.ballot(i, run.spread(p, i))
        return [votes, votes != 0]

    op.acts(count, [(op.args[0], "i"), (op.args[1], "p")], [(op.args[2], "p")])


ROWS = [
    Row("LDG LDS", "E U8 S8 U16 S16 64 128 STRONG SYS GPU CONSTANT", load),
    Row("STG STS", "E U8 S8 U16 S16 64 128 STRONG SYS GPU", store),
    Row("LDL STL", "64 128", spill),
    Row("LDSM STSM", "16 M88 MT88 1 2 4", matrix),
    Row("ATOMG REDG", "E ADD MIN MAX AND OR XOR EXCH S32 STRONG GPU", atomic),
    Row("SHFL", "UP DOWN BFLY IDX", exchange),
    Row("REDUX", "SUM MIN MAX AND OR XOR S32", reduce),
    Row("VOTE VOTEU", "ANY", vote),
]
