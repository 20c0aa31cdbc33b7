"""Compare two recorded runs: the first op whose results differ beyond rounding."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from ampcompile.dtypes import LOW, short_name
from ampcompile.errors import AuditError

from .recording import Recording
from .records import Numbers, OpRecord, plain
from .show import comparison_page, frame

FEW = 64
"""Results of fewer elements may be nearer to the exact ones by chance."""
SAME = 1e-6
"""Most relative distance of two runs in float64 that compute the same: of ops that have a kernel for float32 alone."""
FACTOR = 4
"""How many times larger an error may be than the other run's."""
_EPS_OF_SUMS = torch.finfo(torch.float32).eps
_NOTHING = Numbers(None, None)


@dataclass(frozen=True)
class Row:
    """An input or op of both runs, or of one: the other is None."""

    a: OpRecord | None
    b: OpRecord | None
    apart: float = 0.0
    """Distance of the two runs in float64, relative."""
    so_far: tuple[float, float] = (0.0, 0.0)
    """The largest error from the start until here, of each run."""
    limits: tuple[float, float | None, float | None] | None = None
    """The most that rounding may make of the distance, the op's own error and the error so far; None where nothing
    was measured. None if one run alone has the op."""

    @property
    def place(self) -> OpRecord:
        """The op, in a if both have it."""
        [place, *_] = (op for op in (self.a, self.b) if op is not None)
        return place

    @property
    def alone(self) -> tuple[float | None, float | None]:
        """The op's own error in each run."""
        a, b = ((op and op.numbers) or _NOTHING for op in (self.a, self.b))
        return a.local, b.local

    @property
    def exceeds(self) -> tuple[bool, bool, bool]:
        """Which of the three limits are exceeded: distance, the op's own error, the error so far."""
        if self.limits is None:
            return (False, False, False)
        apart, alone, so_far = self.limits
        return self.apart > apart, _exceed(self.alone, alone), _exceed(self.so_far, so_far)

    @property
    def why(self) -> str:
        """How the two differ; empty if only by rounding."""
        if self.a is None or self.b is None:
            return ""
        if self.a.dtype != self.b.dtype:
            return f"{_dtype(self.a)} in a, {_dtype(self.b)} in b"
        apart, alone, so_far = self.exceeds
        if apart:
            return f"computed in float64 the results are {self.apart:.1e} apart, of their norm"
        if alone:
            return "the op's own error is {:.1e} in a, {:.1e} in b".format(*self.alone)
        return "the error so far is {:.1e} in a, {:.1e} in b".format(*self.so_far) if so_far else ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        a, b = (op and plain(op) for op in (self.a, self.b))
        rest = {"apart": self.apart, "so_far": self.so_far, "limits": self.limits, "why": self.why}
        return {"a": a, "b": b, **rest}


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs."""

    place: OpRecord
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
    about: tuple[Mapping[str, str], Mapping[str, str]]
    """Versions, device and options of a and of b."""
    rows: Sequence[Row] = field(repr=False)
    """All inputs and ops of both runs, in order."""
    files: tuple[str, str] = field(default=("", ""), compare=False)
    """Their names, where files were compared."""

    @property
    def agree(self) -> bool:
        """True if neither ops nor results differ beyond rounding."""
        return self.first is None and not self.results

    @property
    def only_a(self) -> int:
        """Inputs and ops that a has alone."""
        return sum(row.b is None for row in self.rows)

    @property
    def only_b(self) -> int:
        """Inputs and ops that b has alone."""
        return sum(row.a is None for row in self.rows)

    @property
    def compared(self) -> int:
        """Inputs and ops that both runs have."""
        return len(self.rows) - self.only_a - self.only_b

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first = self.first and {**vars(self.first), "place": plain(self.first.place)}
        names = ("agree", "results", "compared", "only_a", "only_b", "about", "files")
        return {"first": first, "rows": [row.as_dict() for row in self.rows]} | {n: getattr(self, n) for n in names}

    def save(self, path: str | Path) -> None:
        """Write the two runs side by side as a self-contained page: `comparison.save("compared.html")`."""
        Path(path).write_text(comparison_page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return frame(comparison_page(self))

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
    first, second = (run if isinstance(run, Recording) else Recording.load(run) for run in (a, b))
    rows = list(_make_rows(first.steps, second.steps))
    if all(row.limits is None or row.place.op.startswith("input ") for row in rows):
        raise AuditError(
            "found no op that both runs have; expected two recordings of one model, on inputs of the same shapes. "
            "Record both with the same call."
        )
    found = {f"{name} in {run}": why for run, r in (("a", first), ("b", second)) for name, why in _astray(r).items()}
    file_a, file_b = ("" if isinstance(run, Recording) else os.path.basename(run) for run in (a, b))
    return Comparison(_first_difference(rows), found, (first.about, second.about), rows, (file_a, file_b))


def _first_difference(rows: Sequence[Row]) -> Difference | None:
    """Return the first difference, at an earlier op if it reads one that the other run lacks."""
    found = next((number for number, row in enumerate(rows) if row.why), None)
    if found is None:
        return None
    why = rows[found].why
    for run, ops in (("a", [row.a for row in rows]), ("b", [row.b for row in rows])):
        row_of = {op.name: number for number, op in enumerate(ops) if op is not None}
        row, op = found, ops[found]
        while op is not None and (lacking := [row_of[o] for o in op.reads if rows[row_of[o]].limits is None]):
            row = lacking[-1]
            op = ops[row]
        if op is not None and row != found:
            return Difference(op, f"it gives {_dtype(op)}; after it: {why}", run, row)
    return Difference(rows[found].place, why, row=found)


def _astray(run: Recording) -> dict[str, str]:
    """Results of a compiled call that are further from float64 than those of its ops, and how far."""
    worst = max((_from_start(op) for op in run.steps), default=0.0)
    found = {}
    for name, result in run.results.items():
        expected = max(result.ops, worst if result.elements < FEW else 0.0)
        if result.call > FACTOR * expected + FEW * _EPS_OF_SUMS:
            found[name] = f"{result.call:.1e} from float64, by its ops {result.ops:.1e}"
    return found


def _make_rows(a: Sequence[OpRecord], b: Sequence[OpRecord]) -> Iterator[Row]:
    """Yield the rows of two runs, in order; what one of them has alone stands before the next pair."""
    so_far, inexact, i, j = (0.0, 0.0), False, 0, 0  # inexact: the runs in float64 aren't, by now
    for i_next, j_next in [*_pair(a, b).items(), (len(a), len(b))]:
        yield from (Row(only, None) for only in a[i:i_next])
        yield from (Row(None, only) for only in b[j:j_next])
        i, j = i_next + 1, j_next + 1
        if i_next < len(a):
            ours, theirs = a[i_next], b[j_next]
            so_far = max(so_far[0], _from_start(ours)), max(so_far[1], _from_start(theirs))
            halves = [torch.finfo(op.dtype).eps / 2 for op in (ours, theirs) if op.dtype in LOW]
            rounding = max([*halves, FACTOR * _EPS_OF_SUMS * max(ours.length, theirs.length) ** 0.5])
            row = Row(ours, theirs, _distance(ours.fingerprint, theirs.fingerprint), so_far)
            apart = SAME + FACTOR * (sum(so_far) + rounding) if inexact else SAME
            limits = apart, _limit(row.alone, rounding), _limit(so_far, rounding)
            yield Row(ours, theirs, row.apart, so_far, limits)
            inexact |= None in row.alone


def _pair(a: Sequence[OpRecord], b: Sequence[OpRecord]) -> dict[int, int]:
    """Pair steps of the same op, in order: first those with the same numbers, between them those that are left."""
    ours, theirs = ([(s.backward, s.module, s.op, s.shape) for s in steps] for steps in (a, b))
    our_numbers, their_numbers = (
        [(key, f"{s.fingerprint[0]:.3e}") for key, s in zip(keys, steps, strict=True)]
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


def _from_start(op: OpRecord) -> float:
    return (op.numbers or _NOTHING).cumulative or 0.0


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the relative L2 distance of two tensors, estimated from their fingerprints."""
    squares = [(x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)]
    norm = max(a[0], b[0])
    return (sum(squares) / len(squares)) ** 0.5 / norm if norm else 0.0


def _limit(errors: tuple[float | None, float | None], rounding: float) -> float | None:
    known = [error for error in errors if error is not None and not math.isnan(error)]
    return FACTOR * min(known) + rounding if len(known) == 2 else None


def _exceed(errors: tuple[float | None, float | None], limit: float | None) -> bool:
    return limit is not None and max(error or 0.0 for error in errors) > limit


def _dtype(op: OpRecord) -> str:
    return short_name(op.dtype) if op.dtype is not None else ""
