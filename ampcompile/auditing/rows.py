"""Two recorded runs side by side: ops paired, and what rounding may make of each pair's differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from .recording import Step, distance
from .records import Place

SAME = 1e-6
"""Most relative distance of two runs in float64 that compute the same: of ops that have a kernel for float32 alone."""
FACTOR = 4
"""How many times larger an error may be than the other run's."""
_EPS = {"bf16": torch.finfo(torch.bfloat16).eps, "f16": torch.finfo(torch.float16).eps}
EPS_OF_SUMS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Limits:
    """The most that rounding may make of two runs' differences; None where nothing was measured."""

    apart: float
    alone: float | None
    so_far: float | None


@dataclass(frozen=True)
class Row:
    """An input or op of both runs, or of one: the other is None."""

    a: Step | None
    b: Step | None
    apart: float = 0.0
    """Distance of the two runs in float64, relative."""
    so_far: tuple[float, float] = (0.0, 0.0)
    """The largest error from the start until here, of each run."""
    limits: Limits | None = None
    """None if one run alone has the op."""

    @property
    def place(self) -> Place:
        """The op's place, in a if both have it."""
        [place, *_] = (step.place for step in (self.a, self.b) if step is not None)
        return place

    @property
    def why(self) -> str:
        """How the two differ; empty if only by rounding."""
        if self.a is None or self.b is None or self.limits is None:
            return ""
        if self.a.dtype != self.b.dtype:
            return f"{self.a.dtype} in a, {self.b.dtype} in b"
        apart, alone, so_far = self.exceeds
        if apart:
            return f"computed in float64 the results are {self.apart:.1e} apart, of their norm"
        if alone:
            return f"the op's own error is {self.a.alone:.1e} in a, {self.b.alone:.1e} in b"
        if so_far:
            return "the error so far is {:.1e} in a, {:.1e} in b".format(*self.so_far)
        return ""

    @property
    def exceeds(self) -> tuple[bool, bool, bool]:
        """Which of the three limits are exceeded: distance, the op's own error, the error so far."""
        if self.a is None or self.b is None or self.limits is None:
            return (False, False, False)
        apart = self.apart > self.limits.apart
        return apart, _exceed(self.a.alone, self.b.alone, self.limits.alone), _exceed(*self.so_far, self.limits.so_far)


def make_rows(a: Sequence[Step], b: Sequence[Step]) -> Iterator[Row]:
    """Yield the rows of two runs, in order; what one of them has alone stands before the next pair."""
    so_far, inexact = (0.0, 0.0), False  # inexact: the runs in float64 aren't, by now
    for i, j in _merge(_pair(a, b), len(a), len(b)):
        if i is None or j is None:
            yield Row(None if i is None else a[i], None if j is None else b[j])
            continue
        ours, theirs = a[i], b[j]
        so_far = max(so_far[0], ours.from_start or 0.0), max(so_far[1], theirs.from_start or 0.0)
        rounding = max(
            *(_EPS.get(step.dtype, 0.0) / 2 for step in (ours, theirs)),
            FACTOR * EPS_OF_SUMS * max(ours.length, theirs.length) ** 0.5,
        )
        apart = SAME + FACTOR * (sum(so_far) + rounding) if inexact else SAME
        limits = Limits(apart, _limit(ours.alone, theirs.alone, rounding), _limit(*so_far, rounding))
        yield Row(ours, theirs, distance(ours.exact, theirs.exact), so_far, limits)
        inexact |= ours.alone is None or theirs.alone is None


def _pair(a: Sequence[Step], b: Sequence[Step]) -> dict[int, int]:
    """Pair steps of the same op, in order: first those with the same numbers, between them those that are left."""
    ours, theirs = ([(s.place.backward, s.place.module, s.place.op, s.shape) for s in steps] for steps in (a, b))
    our_numbers, their_numbers = (
        [(key, f"{s.exact[0]:.3e}") for key, s in zip(keys, steps, strict=True)]
        for keys, steps in ((ours, a), (theirs, b))
    )
    pairs: dict[int, int] = {}
    for tag, i, i_end, j, j_end in SequenceMatcher(None, our_numbers, their_numbers, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs |= zip(range(i, i_end), range(j, j_end), strict=True)
        elif tag == "replace":
            left = SequenceMatcher(None, ours[i:i_end], theirs[j:j_end], autojunk=False).get_matching_blocks()
            pairs |= {i + block.a + k: j + block.b + k for block in left for k in range(block.size)}
    return pairs


def _merge(pairs: Mapping[int, int], a: int, b: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield the numbers of steps side by side: what one run has alone, then the next pair."""
    i = j = 0
    for i_next, j_next in [*pairs.items(), (a, b)]:
        yield from ((only, None) for only in range(i, i_next))
        yield from ((None, only) for only in range(j, j_next))
        if i_next < a:
            yield i_next, j_next
        i, j = i_next + 1, j_next + 1


def _limit(a: float | None, b: float | None, rounding: float) -> float | None:
    return None if a is None or b is None or math.isnan(a) or math.isnan(b) else FACTOR * min(a, b) + rounding


def _exceed(a: float | None, b: float | None, limit: float | None) -> bool:
    return a is not None and b is not None and limit is not None and max(a, b) > limit
