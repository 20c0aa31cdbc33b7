"""How far two ways of running a model are from float64, over several draws of inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.numbers import same_bits
from proof.models.subject import Run
from proof.ops.compare import WORSE, kind_of

FLOOR = 0.01
"""A tensor whose numbers are that much smaller than the others' counts as if it were as large: a gradient that is zero
but for rounding has no relative error.
"""
FLIP = 2.0
"""The most that one draw counts for; its inverse is the least. Where two numbers all but tie for a maximum, or one is
all but zero before a ReLU, a rounding decides about a whole gradient, for one run or for the other.
"""


class Errors(NamedTuple):
    """Of one kind of tensor in one draw, summed over tensors and relative to each one's size."""

    ours: float
    theirs: float
    ulp: float

    def ratio(self) -> float:
        """Ours by the most that it may be, in this draw alone."""
        allowed = WORSE * self.theirs + self.ulp
        if not allowed:
            return math.inf if self.ours else 1 / FLIP
        return min(max(self.ours / allowed, 1 / FLIP), FLIP)


@dataclass
class Tally:
    """Errors of ours and of eager autocast's, by kind of tensor, of each draw."""

    same: bool = True
    """True if all bits were equal."""
    dtypes: str = ""
    """Where dtypes or shapes differ."""
    zeros: str = ""
    """Where ours gives zeros and eager autocast nothing."""
    lost: str = ""
    """Where ours isn't finite, and eager autocast and float64 are."""
    draws: dict[str, list[Errors]] = field(default_factory=dict)

    def add(self, ours: Run, theirs: Run, exact: Run) -> None:
        """Count one draw."""
        for name in Run._fields:
            rows = [list(getattr(run, name)) for run in (ours, theirs, exact)]
            for place, (mine, near) in enumerate(zip(*rows[:2], strict=False)):
                if near is None and mine is not None and not mine.any():
                    self.zeros, rows[0][place] = f"{name}[{place}] is zeros; eager none", None
            kinds = [[kind_of(value) for value in row] for row in rows[:2]]
            if kinds[0] != kinds[1]:
                self.dtypes = f"{name}: {_first_difference(*kinds)}"
                return
            self.same = self.same and same_bits(*rows[:2])
            tensors = [row for row in zip(*rows, strict=True) if row[0] is not None]
            if lost := sum(int((t.isfinite() & e.isfinite() & ~o.isfinite()).sum()) for o, t, e in tensors):
                self.lost = f"{name}: {lost} not finite where eager autocast and float64 are"
            self.draws.setdefault(name, []).append(errors(tensors))

    def worse(self) -> str:
        """How ours are further from float64 than they may be; not so: an empty text."""
        if self.lost or self.same:
            return self.lost
        for name, draws in self.draws.items():
            mean = math.exp(sum(math.log(draw.ratio()) for draw in draws) / len(draws))
            if mean > 1:
                last = f"error {draws[-1].ours:.3g}, eager {draws[-1].theirs:.3g} in the last"
                return f"{name}: {mean:.3g} times what is allowed, the mean of {len(draws)} inputs; {last}"
        return ""


def errors(tensors: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Errors:
    """Of triples: ours, eager autocast's, in float64. What isn't finite in one of these two counts for nothing."""
    rows = []
    for ours, theirs, exact in tensors:
        o, t, e = (x.detach().double() for x in (ours, theirs, exact))
        known = t.isfinite() & e.isfinite() & o.isfinite()
        if count := int(known.sum()):
            sizes = [float(x[known].square().sum()) / count for x in (o - e, t - e, e)]
            rows.append((*sizes, torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0))
    least = FLOOR**2 * sum(row[2] for row in rows) / len(rows) if rows else 0.0
    scales = [max(row[2], least) or 1.0 for row in rows]
    ours_, theirs_ = (sum((row[i] / s) ** 0.5 for row, s in zip(rows, scales, strict=True)) for i in (0, 1))
    return Errors(ours_, theirs_, sum(row[3] for row in rows))


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors; eager {len(theirs)}"
    return next(f"[{n}] {a}; eager {b}" for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
