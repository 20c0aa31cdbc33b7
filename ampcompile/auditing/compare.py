"""Compare two recorded runs: the first op whose results differ beyond rounding."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from ampcompile.errors import AuditError

from .recording import Recording, Step, distance
from .records import Place

SAME = 1e-6
"""Most relative distance of two runs in float64 that compute the same: of ops that have a kernel for float32 alone."""
FACTOR = 4
"""How many times larger an error may be than the other run's."""
FEW = 64
"""Results of fewer elements may be nearer to the exact ones by chance."""
_EPS = {"bf16": torch.finfo(torch.bfloat16).eps, "f16": torch.finfo(torch.float16).eps}
_EPS_OF_SUMS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs."""

    place: Place
    """The op, its module, its line, and its direction."""
    why: str
    run: str = ""
    """The run that the op is in, "a" or "b", if the other has none like it."""

    def __str__(self) -> str:
        where = f"{self.place.op}{' (backward)' if self.place.backward else ''} in {self.place.module or 'no module'}"
        line = os.path.basename(self.place.source) or "unknown line"
        return f"{where}, {line}{f', in {self.run} alone' if self.run else ''}: {self.why}"


@dataclass(frozen=True)
class Comparison:
    """The result of `ampcompile.compare`. `str` is a few lines."""

    first: Difference | None
    """The first difference; None if all ops agree but for rounding."""
    results: Mapping[str, str]
    """Results of the compiled calls that their own ops don't account for, with the reason."""
    compared: int
    """Inputs and ops that both runs have."""
    only_a: int
    only_b: int
    about: tuple[Mapping[str, str], Mapping[str, str]]

    @property
    def agree(self) -> bool:
        """True if neither ops nor results differ beyond rounding."""
        return self.first is None and not self.results

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "agree": self.agree}

    def __str__(self) -> str:
        counts = f"{self.compared} inputs and ops compared, {self.only_a} in a alone, {self.only_b} in b alone"
        changed = [
            f"{name}: {a.get(name, 'none')} in a, {b.get(name, 'none')} in b"
            for a, b in [self.about]
            for name in dict.fromkeys([*a, *b])
            if a.get(name) != b.get(name)
        ]
        first = f"first difference: {self.first}" if self.first else "no op differs beyond rounding"
        results = [f"{name}: {why}" for name, why in self.results.items()]
        if results and self.first is None:
            results.append("ops agree and results don't: look at the lowering, or at copies of weights")
        return "\n".join([first, *results, counts, *changed])


def compare(a: Recording | str | Path, b: Recording | str | Path) -> Comparison:
    """Find the first op whose results differ beyond rounding between two recordings, or files of recordings.

    Ops are paired by direction, module, name and shape. Two paired ops differ if their dtypes do, if the runs in
    float64 do (then they compute something else, or read other numbers), if one rounds more than the other, or if one
    has become less exact on the way, through an op that the other run doesn't have. Errors may be four times those of
    the other run, plus half a unit of a 16-bit result, or four units of float32 times the root of a sum's length, so
    that another order of sums is no difference. A result of a compiled call differs if it is as much further from
    float64 than that of its ops. Raises AuditError for a file that is no recording, and for runs without a common op.

    >>> a = ampcompile.record(model, lower="aot_eager")(x)
    >>> ampcompile.compare(a, ampcompile.record(model, lower="aot_eager", policy="module *=fp32")(x)).first.why
    'it gives bf16; after it: bf16 in a, f32 in b'
    """
    runs = [run if isinstance(run, Recording) else Recording.load(run) for run in (a, b)]
    pairs = _pair(runs[0].steps, runs[1].steps)
    if not any(not runs[0].steps[i].place.op.startswith("input ") for i in pairs):
        raise AuditError(
            "found no op that both runs have; expected two recordings of one model, on inputs of the same shapes. "
            "Record both with the same call."
        )
    first = _first_difference(runs[0].steps, runs[1].steps, pairs)
    results = {f"{name} in {run}": why for run, r in zip("ab", runs, strict=True) for name, why in _astray(r).items()}
    only_a, only_b = (len(run.steps) - len(pairs) for run in runs)
    return Comparison(first, results, len(pairs), only_a, only_b, (runs[0].about, runs[1].about))


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


def _first_difference(a: Sequence[Step], b: Sequence[Step], pairs: Mapping[int, int]) -> Difference | None:
    so_far, inexact = [0.0, 0.0], False
    for i, j in pairs.items():
        ours, theirs = a[i], b[j]
        so_far = [max(worst, s.from_start or 0.0) for worst, s in zip(so_far, (ours, theirs), strict=True)]
        why = _why(ours, theirs, so_far, inexact)
        if why:
            return _cause(a, b, pairs, i, why)
        inexact |= ours.alone is None or theirs.alone is None
    return None


def _why(ours: Step, theirs: Step, so_far: Sequence[float], inexact: bool) -> str:
    """Say how two paired steps differ; empty if only by rounding. `inexact`: the runs in float64 aren't, by now."""
    if ours.dtype != theirs.dtype:
        return f"{ours.dtype} in a, {theirs.dtype} in b"
    allowed = max(_EPS.get(ours.dtype, 0.0) / 2, FACTOR * _EPS_OF_SUMS * max(ours.length, theirs.length) ** 0.5)
    apart = distance(ours.exact, theirs.exact)
    if apart > (SAME + FACTOR * (sum(so_far) + allowed) if inexact else SAME):
        return f"computed in float64 the results are {apart:.1e} apart, of their norm"
    own = _more(ours.alone, theirs.alone, allowed)
    if own:
        return f"the op's own error is {own}"
    since = _more(so_far[0], so_far[1], allowed)
    return f"the error so far is {since}" if since else ""


def _more(a: float | None, b: float | None, allowed: float) -> str:
    if a is None or b is None or math.isnan(a) or math.isnan(b):
        return ""
    return f"{a:.1e} in a, {b:.1e} in b" if max(a, b) > FACTOR * min(a, b) + allowed else ""


def _cause(a: Sequence[Step], b: Sequence[Step], pairs: Mapping[int, int], i: int, why: str) -> Difference:
    """Return a difference found at one pair of steps, at an earlier step if it reads one that the other run lacks."""
    back = {theirs: ours for ours, theirs in pairs.items()}
    for run, steps, start, paired in (("a", a, i, pairs), ("b", b, pairs[i], back)):
        place = start
        while lacking := [o for o in steps[place].operands if o not in paired]:
            place = lacking[-1]
        if place != start:
            return Difference(steps[place].place, f"it gives {steps[place].dtype}; after it: {why}", run)
    return Difference(a[i].place, why)


def _astray(run: Recording) -> dict[str, str]:
    """Results of a compiled call that are further from float64 than those of its ops, and how far."""
    worst = max((s.from_start or 0.0 for s in run.steps), default=0.0)
    found = {}
    for name, result in run.results.items():
        expected = max(result.ops, worst if result.elements < FEW else 0.0)
        if result.call > FACTOR * expected + FEW * _EPS_OF_SUMS:
            found[name] = f"{result.call:.1e} from float64, by its ops {result.ops:.1e}"
    return found
