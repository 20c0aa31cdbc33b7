"""Integers, bits and predicates. What is carried from one half of a number to the other is a predicate."""

from typing import Any

import numpy as np

from softgpu import integers
from softgpu.floats import COMPARE, JOIN, Array, i4, i8, u1, u4, u8
from softgpu.machine_code.operation import Operation, Row
from softgpu.memory import EmulatorError

HALF, LOW = u8(32), u8(0xFFFFFFFF)


def move(op: Operation) -> None:
    op.computes(lambda x, *mask: x, "i", " ".join("i" for _ in op.args[1:]))


def special(op: Operation) -> None:
    """One of the machine's own numbers; the one that is zero, of any width."""
    if op.args[1] == "SRZ":
        op.args[1] = "RZ"
        return op.computes(lambda x: x, "i" if op.has("32") else "l", "i" if op.has("32") else "l")
    op.ins.src, op.ins.out = [op.code.special(op.args[1])], [op.code.register(op.args[0])]
    op.ins.does = lambda x: x


def add(op: Operation) -> None:
    """Up to three numbers and two carries; carried out: whether one is, and whether two are."""
    outs, rest = op.predicates_after(1), op.args
    terms = [k for k in range(1 + outs, len(rest)) if not rest[k].lstrip("!").startswith(("P", "UP"))]
    carries = len(rest) - 1 - outs - len(terms) if op.has("X") else 0
    kinds = ["l"] * len(terms) + ["p"] * carries
    for k in terms:  # a negative one is its complement, and one
        text = rest[k]
        kinds[k - 1 - outs] = "i" if text[0] != "-" or text[1] == "0" else "n"
        rest[k] = "~" + text[1:] if kinds[k - 1 - outs] == "n" else text
    ones = u8(kinds.count("n"))

    def total(*xs: Array) -> Any:
        found = ones
        for x in xs:
            found = found + x.astype(u8)
        return [found.astype(u4), *((found >> HALF) > u8(k) for k in range(outs))] if outs else found.astype(u4)

    op.computes(total, " ".join(["i", *["p"] * outs]), " ".join(kinds).replace("n", "i"))


def multiply(op: Operation) -> None:
    """A product and a sum: of 32 bits, of 64 or their upper half, with a carry in or out."""
    outs = op.predicates_after(1)
    unsigned, wide, high = op.has("U32"), op.has("WIDE"), op.has("HI")
    kinds = "i i l" if wide or high else "i i i"

    def product(a: Array, b: Array, c: Array, *carry: Array) -> Any:
        if not (wide or high):
            return a * b + c + sum((x.astype(u4) for x in carry), u4(0))
        x, y = (v.astype(u8) if unsigned else v.view(i4).astype(i8).view(u8) for v in (a, b))
        total = x * y + c + sum((v.astype(u8) for v in carry), u8(0))
        found = total if wide else (total >> HALF).astype(u4)
        return [found, total < c] if outs else found

    out = "l" if wide else "i"
    op.computes(product, " ".join([out, *["p"] * outs]), f"{kinds} p" if op.has("X") else kinds)


def address(op: Operation) -> None:
    """A shifted number and another one; HI: the upper half of a shifted pair, X: and a carry.

    A negative one is its complement, and one: of zero that is a carry.
    """
    outs = op.predicates_after(1)
    high, signed, carry = op.has("HI"), op.has("SX32"), op.has("X")
    first = op.args[1 + outs]
    negative = first[0] == "-"
    if (negative and high) or (outs and op.args[2 + outs][0] == "-"):
        raise EmulatorError("what a negative number's upper half carries isn't known")
    op.args[1 + outs] = first[1:] if negative else first

    def total(a: Array, b: Array, *more: Array) -> Any:
        *third, by = more[:-1] if carry else more
        wide = a.astype(u8) if not signed else a.view(i4).astype(i8).view(u8)
        wide = wide | third[0].astype(u8) << HALF if third else wide
        wide = wide << by.astype(u8)
        found = wide >> HALF if high else wide & LOW
        found = ((found ^ LOW) + u8(1) if negative else found) + b.astype(u8)
        found = found + more[-1].astype(u8) if carry else found
        return [found.astype(u4), found >> HALF != 0] if outs else found.astype(u4)

    pair = high and not signed
    kinds = ["i", "i", *["i"] * pair, "i", *["p"] * carry]
    op.computes(total, " ".join(["i", *["p"] * outs]), " ".join(kinds))


def of_three(op: Operation) -> None:
    """Any function of three; a predicate says whether a result isn't zero."""
    if op.root == "PLOP3":
        kinds, outs = "p p p i i", "p p"

        def both(a: Array, b: Array, c: Array, first: Array, second: Array) -> list[Array]:
            return [truth(a, b, c, first), truth(a, b, c, second)]

        return op.computes(both, outs, kinds)
    noted = op.predicates_after(0)

    def bits(a: Array, b: Array, c: Array, table: Array, also: Array) -> Any:
        found = integers.of_three(a, b, c, int(table))
        return [(found != 0) | also, found] if noted else found

    op.computes(bits, "p i" if noted else "i", "i i i i p")


def truth(a: Array, b: Array, c: Array, table: Array) -> Array:
    index = a.astype(u1) << 2 | b.astype(u1) << 1 | c.astype(u1)
    return (np.asarray(table, u4) >> index & u4(1)) != 0


def shift(op: Operation) -> None:
    """32 bits of a pair that is shifted: the upper ones, or the lower ones."""
    signed, left, high = op.one_of("S32 S64 U32 U64")[0] == "S", op.has("L"), op.has("HI")

    def shifted(low: Array, by: Array, top: Array) -> Array:
        both = low.astype(u8) | top.astype(u8) << HALF
        both = both.view(i8) if signed and not left else both
        found = integers.shifted(both, by, left).view(u8)
        return (found >> HALF if high else found).astype(u4)

    op.computes(shifted, "i", "i i i")


def compare(op: Operation) -> None:
    """With EX the upper halves of two numbers: if they are equal, a predicate says how the lower ones compare."""
    name, join, unsigned = op.modifiers[0].lower(), JOIN[op.one_of("AND OR XOR").lower()], op.has("U32")
    strict = COMPARE[{"le": "lt", "ge": "gt"}.get(name, name)]

    def both(a: Array, b: Array, p: Array, *low: Array) -> list[Array]:
        found = np.where(a == b, low[0], strict(a, b)) if low else COMPARE[name](a, b)
        return [join(found, p), join(~found, p)]

    t = "i i" if unsigned else "s s"
    op.computes(both, "p p", f"{t} p p" if op.has("EX") else f"{t} p")


def extreme(op: Operation) -> None:
    """The smaller one if the predicate is set; of three; of a sum and another; of two halves each."""
    t = "i" if op.has("U32") else "s"

    def choose(*xs: Array) -> Array:
        *numbers, least = xs
        if op.root == "VIADDMNMX":
            numbers = [numbers[0] + numbers[1], numbers[2]]
        if op.has("S16x2"):
            shape = np.broadcast_shapes(*(x.shape for x in numbers))
            numbers = [np.ascontiguousarray(np.broadcast_to(x, shape)).view(np.int16) for x in numbers]
            least = np.repeat(np.broadcast_to(least, shape), 2)
        small = large = numbers[0]
        for x in numbers[1:]:
            small, large = np.minimum(small, x), np.maximum(large, x)
        return np.ascontiguousarray(np.where(least, small, large)).view(u4)

    op.computes(choose, "i", " ".join([t] * (len(op.args) - 2) + ["p"]))


def choose(op: Operation) -> None:
    op.computes(lambda a, b, p: np.where(p, a, b), "i", "i i p")


def bytes_of(op: Operation) -> None:
    op.computes(lambda a, selector, b: integers.permuted(a, b, selector), "i", "i i i")


def extend(op: Operation) -> None:
    """The lowest bits, with copies of their sign unless U32."""
    t = u4 if op.has("U32") else i4

    def low(a: Array, width: Array) -> Array:
        by = u4(32) - width
        return integers.shifted(integers.shifted(a, by, True).view(t), by, False).view(u4)

    op.computes(low, "i", "i i")


def highest(op: Operation) -> None:
    op.computes(lambda a: u4(31) - integers.leading_zeros(a), "i", "i")


def ones(op: Operation) -> None:
    op.computes(lambda a: integers.bit_rows(a).sum(1).astype(u4), "i", "i")


def predicates_as_bits(op: Operation) -> None:
    """All seven, where a mask says so; elsewhere another register's bits."""
    if op.args[1] != "PR":
        raise KeyError(op.args[1])
    op.args[1:2] = [f"P{k}" for k in range(7)]

    def pack(*xs: Array) -> Array:
        *flags, other, mask = xs
        found = sum((p.astype(u4) << u4(k) for k, p in enumerate(flags)), u4(0))
        return (found & mask) | (other & ~mask)

    op.computes(pack, "i", "p p p p p p p i i")


ROWS = [
    Row("MOV R2UR", "", move),
    Row("CS2R S2R S2UR", "32", special),
    Row("LDC", "", move),
    Row("LDC", "64", lambda op: op.computes(lambda x: x, "l", "l")),
    Row("IADD3 VIADD", "X", add),
    Row("IMAD", "MOV U32 SHL IADD WIDE HI X", multiply),
    Row("LEA", "HI X SX32", address),
    Row("LOP3 PLOP3", "LUT", of_three),
    Row("SHF", "L R HI U32 S32 U64 S64", shift),
    Row("ISETP", "EQ NE LT LE GT GE U32 AND OR XOR EX", compare),
    Row("VIMNMX VIMNMX3 VIADDMNMX", "U32 S16x2", extreme),
    Row("SEL", "", choose),
    Row("PRMT", "", bytes_of),
    Row("SGXT", "U32", extend),
    Row("FLO", "U32", highest),
    Row("POPC", "", ones),
    Row("P2R", "", predicates_as_bits),
]
