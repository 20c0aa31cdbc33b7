"""Compare two recorded runs: the first op whose results differ beyond rounding."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ampcompile.errors import AuditError
from ampcompile.explaining import html

from . import side_by_side
from .recording import Recording, Step
from .records import Place
from .rows import EPS_OF_SUMS, FACTOR, Row, make_rows

FEW = 64
"""Results of fewer elements may be nearer to the exact ones by chance."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs."""

    place: Place
    """The op, its module, its line, and its direction."""
    why: str
    run: str = ""
    """The run that the op is in, "a" or "b", if the other has none like it."""
    row: int = 0
    """Its number among `Comparison.rows`."""

    def __str__(self) -> str:
        return f"{self.place}{f', in {self.run} alone' if self.run else ''}: {self.why}"


@dataclass(frozen=True)
class Comparison:
    """The result of `ampcompile.compare`. `str` is a few lines; in a notebook it is shown as its page."""

    first: Difference | None
    """The first difference; None if all ops agree but for rounding."""
    results: Mapping[str, str]
    """Results of the compiled calls that their own ops don't account for, with the reason."""
    compared: int
    """Inputs and ops that both runs have."""
    only_a: int
    only_b: int
    about: tuple[Mapping[str, str], Mapping[str, str]]
    rows: Sequence[Row] = field(repr=False)
    """All inputs and ops of both runs, in order."""
    files: tuple[str, str] = field(default=("", ""), compare=False)
    """Their names, where files were compared."""

    @property
    def agree(self) -> bool:
        """True if neither ops nor results differ beyond rounding."""
        return self.first is None and not self.results

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [{**asdict(row), "why": row.why} for row in self.rows]
        return {**asdict(self), "rows": rows, "agree": self.agree}

    def save(self, path: str | Path) -> None:
        """Write the two runs side by side as a self-contained page: `comparison.save("compared.html")`."""
        Path(path).write_text(side_by_side.page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.frame(side_by_side.page(self))

    @property
    def headlines(self) -> list[str]:
        """The first lines of the text: what differs, and how many inputs and ops were compared."""
        first = f"first difference: {self.first}" if self.first else "no op differs beyond rounding"
        results = [f"{name}: {why}" for name, why in self.results.items()]
        if results and self.first is None:
            results.append("ops agree and results don't: look at the lowering, or at copies of weights")
        counts = f"{self.compared} inputs and ops compared, {self.only_a} in a alone, {self.only_b} in b alone"
        return [first, *results, counts]

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """Versions, device and options by name, of a and of b."""
        a, b = self.about
        return [(name, a.get(name, "none"), b.get(name, "none")) for name in dict.fromkeys([*a, *b])]

    def __str__(self) -> str:
        changed = [f"{name}: {a} in a, {b} in b" for name, a, b in self.settings if a != b and name != "recorded"]
        return "\n".join([*self.headlines, *changed])


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
    rows = list(make_rows(runs[0].steps, runs[1].steps))
    compared = [row for row in rows if row.limits is not None]
    if all(row.place.op.startswith("input ") for row in compared):
        raise AuditError(
            "found no op that both runs have; expected two recordings of one model, on inputs of the same shapes. "
            "Record both with the same call."
        )
    results = {f"{name} in {run}": why for run, r in zip("ab", runs, strict=True) for name, why in _astray(r).items()}
    only_a, only_b = (len(run.steps) - len(compared) for run in runs)
    names = ["" if isinstance(run, Recording) else os.path.basename(run) for run in (a, b)]
    about = runs[0].about, runs[1].about
    return Comparison(
        _first_difference(rows), results, len(compared), only_a, only_b, about, rows, (names[0], names[1])
    )


def _first_difference(rows: Sequence[Row]) -> Difference | None:
    """Return the first difference, at an earlier op if it reads one that the other run lacks."""
    found = next((number for number, row in enumerate(rows) if row.why), None)
    if found is None:
        return None
    why = rows[found].why
    for run, steps in (("a", [row.a for row in rows]), ("b", [row.b for row in rows])):
        row_of = [number for number, step in enumerate(steps) if step is not None]
        row = found
        while lacking := [row_of[o] for o in _operands(steps[row]) if rows[row_of[o]].limits is None]:
            row = lacking[-1]
        step = steps[row]
        if step is not None and row != found:
            return Difference(step.place, f"it gives {step.dtype}; after it: {why}", run, row)
    return Difference(rows[found].place, why, row=found)


def _operands(step: Step | None) -> Sequence[int]:
    return () if step is None else step.operands


def _astray(run: Recording) -> dict[str, str]:
    """Results of a compiled call that are further from float64 than those of its ops, and how far."""
    worst = max((s.from_start or 0.0 for s in run.steps), default=0.0)
    found = {}
    for name, result in run.results.items():
        expected = max(result.ops, worst if result.elements < FEW else 0.0)
        if result.call > FACTOR * expected + FEW * EPS_OF_SUMS:
            found[name] = f"{result.call:.1e} from float64, by its ops {result.ops:.1e}"
    return found
