"""How far two ways of running a model are from float64, over several draws of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proof.models.subject import Run
from proof.ops.compare import WORSE
from tests.compiling import same_bits

FLOOR = 0.01
"""A tensor whose numbers are that much smaller than the others' counts as if it were as large: a gradient that is zero
but for rounding has no relative error.
"""


@dataclass
class Tally:
    """Squared distances of ours and of eager autocast's from float64, by kind of tensor, then by tensor."""

    same: bool = True
    """Whether all bits were equal."""
    wrong: str = ""
    """What is wrong in kind."""
    sums: dict[str, list[list[float]]] = field(default_factory=dict)
    """Of each tensor: ours, eager autocast's, the exact numbers' own squares, how many numbers, one ulp."""

    def add(self, ours: Run, theirs: Run, exact: Run) -> None:
        """Count one draw."""
        for name in Run._fields:
            rows = [getattr(run, name) for run in (ours, theirs, exact)]
            kinds = [[_kind(value) for value in row] for row in rows[:2]]
            if kinds[0] != kinds[1]:
                self.wrong = self.wrong or f"{name}: {_first_difference(*kinds)}"
                return
            self.same = self.same and same_bits(*rows[:2])
            sums = self.sums.setdefault(name, [[0.0] * 5 for _ in rows[0]])
            for place, row in enumerate(zip(*rows, strict=True)):
                if row[0] is not None:
                    self._add(f"{name}[{place}]", sums[place], *row)

    def _add(self, name: str, sums: list[float], ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
        o, t, e = (x.detach().double() for x in (ours, theirs, exact))
        known = t.isfinite() & e.isfinite()
        if lost := int((known & ~o.isfinite()).sum()):
            self.wrong = self.wrong or f"{name}: {lost} not finite where eager autocast and float64 are"
            return
        o, t, e = (x[known] for x in (o, t, e))
        ulp = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
        new = [(o - e).square().sum(), (t - e).square().sum(), e.square().sum(), known.sum()]
        sums[:] = [*(a + float(b) for a, b in zip(sums, new, strict=False)), ulp]

    def errors(self, name: str) -> tuple[float, float, float]:
        """Relative errors of ours and of eager autocast's, and one ulp, each summed over all tensors of a kind."""
        rows = [row for row in self.sums.get(name, ()) if row[3]]
        sizes = [row[2] / row[3] for row in rows]
        least = FLOOR**2 * (sum(sizes) / len(sizes)) if sizes else 0.0
        scales = [max(size, least) * row[3] or 1.0 for size, row in zip(sizes, rows, strict=True)]
        ours, theirs = (sum((row[i] / s) ** 0.5 for row, s in zip(rows, scales, strict=True)) for i in (0, 1))
        return ours, theirs, sum(row[4] for row in rows)

    def verdict(self) -> str:
        """What is wrong; nothing: an empty text."""
        if self.wrong or self.same:
            return self.wrong
        for name in Run._fields:
            ours, theirs, ulp = self.errors(name)
            if not ours <= WORSE * theirs + ulp:
                return f"{name}: error {ours:.3g}, eager {theirs:.3g}, summed over {len(self.sums[name])} tensors"
        return ""


def _kind(value: Tensor | None) -> str:
    return "none" if value is None else f"{value.dtype} {tuple(value.shape)}"


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors; eager {len(theirs)}"
    return next(f"[{n}] {a}; eager {b}" for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
