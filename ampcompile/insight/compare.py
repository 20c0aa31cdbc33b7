"""Compare two recorded runs: the first op whose results differ beyond rounding."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from ampcompile.dtypes import LOW
from ampcompile.errors import AuditError
from ampcompile.records.graphs import OpRecord, plain

from .recording import Recording
from .show import error_text, table, text_of

FEW = 64  # results of fewer elements may be nearer to the exact ones by chance
APART, OWN, SO_FAR = "apart in float64", "own errors", "errors so far"  # the names of measures
ROWS = 20  # most rows that the text has
SAME = 1e-6
"""Most relative distance of two float64 runs that compute the same: above 0, as some ops have only a float32 kernel"""
FACTOR = 4  # how many times larger an error may be than the other run's
_EPS_OF_SUMS = torch.finfo(torch.float32).eps


class Measure(NamedTuple):
    """Something that differs between two runs, and the most that rounding may make of it."""

    what: str
    found: tuple[float | None, ...]
    """Of a and of b, or of both together; None where nothing was measured."""
    limit: float | None

    @property
    def is_over(self) -> bool:
        """True if it is more than rounding may make of it."""
        return self.limit is not None and max(error or 0.0 for error in self.found) > self.limit

    def __str__(self) -> str:
        return ", ".join(map(error_text, self.found))


@dataclass(frozen=True)
class Row:
    """An input or op of both runs, or of one: the other is None. `str` says where it is, and how the runs differ."""

    a: OpRecord | None
    b: OpRecord | None
    measures: tuple[Measure, ...] = ()
    """The distance of the two runs in float64, relative; the op's own errors; the largest errors from the start until
    here. Empty if one run alone has the op."""
    why: str = ""
    """How the two differ; empty if only by rounding."""

    @property
    def place(self) -> OpRecord:
        """The op, in a if both have it."""
        [place, *_] = (op for op in (self.a, self.b) if op is not None)
        return place

    @property
    def run(self) -> str:
        """The run that the op is in, "a" or "b", if the other has none like it."""
        return "a" if self.b is None else "b" if self.a is None else ""

    def __str__(self) -> str:
        return f"{self.place}{f', in {self.run} alone' if self.run else ''}: {self.why}"


@dataclass(frozen=True)
class Comparison:
    """The result of `ampcompile.compare`. `str` shows the two runs side by side where they differ."""

    first: Row | None
    """The first difference; None if all ops agree but for rounding."""
    results: Mapping[str, str]
    """Results of the compiled calls that their own ops don't account for, with the reason."""
    about: tuple[Mapping[str, str], Mapping[str, str]]
    """Versions, device and options of a and of b."""
    rows: Sequence[Row] = field(repr=False)
    """All inputs and ops of both runs, in order."""

    @property
    def agree(self) -> bool:
        """True if neither ops nor results differ beyond rounding."""
        return self.first is None and not self.results

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return plain(self) | {"agree": self.agree, "rows": plain(self.rows)}

    @property
    def headlines(self) -> list[str]:
        """The first lines of the text: what differs, and how many inputs and ops were compared."""
        first = f"first difference: {self.first}" if self.first else "no op differs beyond rounding"
        results = [f"{name}: {why}" for name, why in self.results.items()]
        if results and self.first is None:
            results.append("ops agree and results don't: look at the lowering, or at copies of weights")
        both, a, b = (sum(row.run == run for row in self.rows) for run in ("", "a", "b"))
        return [first, *results, f"{both} inputs and ops compared, {a} in a alone, {b} in b alone"]

    def __str__(self) -> str:
        a, b = self.about
        settings = [(name, a.get(name, "none"), b.get(name, "none")) for name in dict.fromkeys([*a, *b])]
        changed = [row for row in settings if row[1] != row[2] and row[0] != "recorded"]
        parts: list[str | Table] = [*self.headlines]
        if changed:
            parts += ["", table(["setting", "a", "b"], [], changed)]
        if self.first is not None:
            differing = [row for row in self.rows[self.rows.index(self.first) :] if row.why or row.run]
            parts += ["", f"from there on {len(differing)} differ{', the first of them' * (len(differing) > ROWS)}:"]
            parts.append(_side_by_side(differing[:ROWS]))
        return text_of(parts)


def _side_by_side(rows: Sequence[Row]) -> Table:
    """The table of these rows: dtypes, norms and errors of both runs."""
    shown = []
    for row in rows:
        dtypes = [op.in_dtype if op else "" for op in (row.a, row.b)]
        norms = [f"{op.fingerprint[0]:.4g}" if op else "" for op in (row.a, row.b)]
        place, measured = row.place, [str(measure) for measure in row.measures] or ["", "", ""]
        shown.append((place.title, place.module, place.line, *dtypes, *norms, *measured))
    return table(["op", "module", "line", "a", "b"], ["norm in a", "norm in b", APART, OWN, SO_FAR], shown)


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
    if all(row.run or row.place.op.startswith("input ") for row in rows):
        raise AuditError(
            "found no op that both runs have; expected two recordings of one model, on inputs of the same shapes. "
            "Record both with the same call."
        )
    apart = {f"{name} in {run}": why for run, r in (("a", first), ("b", second)) for name, why in _differs(r).items()}
    return Comparison(_mark_first(rows), apart, (first.about, second.about), rows)


def _mark_first(rows: list[Row]) -> Row | None:
    """Return the first difference; if it reads an op that the other run lacks, that one's row, marked as different."""
    first = next((number for number, row in enumerate(rows) if row.why), None)
    if first is None:
        return None
    for ops in ([row.a for row in rows], [row.b for row in rows]):
        row_of = {op.name: number for number, op in enumerate(ops) if op is not None}
        at, op = first, ops[first]
        while op is not None and (lacking := [row_of[name] for name in op.reads if rows[row_of[name]].run]):
            at = lacking[-1]
            op = ops[at]
        if op is not None and at != first:
            rows[at] = replace(rows[at], why=f"it gives {op.in_dtype}; after it: {rows[first].why}")
            return rows[at]
    return rows[first]


def _differs(run: Recording) -> dict[str, str]:
    """Results of a compiled call that are further from float64 than those of its ops, and how far."""
    worst = max((op.numbers.cumulative or 0.0 for op in run.steps), default=0.0)
    differing = {}
    for name, result in run.results.items():
        expected = max(result.ops, worst if result.elements < FEW else 0.0)
        if result.call > FACTOR * expected + FEW * _EPS_OF_SUMS:
            differing[name] = f"{result.call:.1e} from float64, by its ops {result.ops:.1e}"
    return differing


def _make_rows(a: Sequence[OpRecord], b: Sequence[OpRecord]) -> Iterator[Row]:
    """Yield the rows of two runs, in order; what one of them has alone stands before the next pair."""
    so_far, inexact, i, j = (0.0, 0.0), False, 0, 0  # inexact: by now, the float64 runs aren't exact
    for i_next, j_next in [*_pair(a, b).items(), (len(a), len(b))]:
        yield from (Row(only, None) for only in a[i:i_next])
        yield from (Row(None, only) for only in b[j:j_next])
        i, j = i_next + 1, j_next + 1
        if i_next < len(a):
            ours, theirs = a[i_next], b[j_next]
            ours_so_far, theirs_so_far = (op.numbers.cumulative or 0.0 for op in (ours, theirs))
            so_far = max(so_far[0], ours_so_far), max(so_far[1], theirs_so_far)
            halves = [torch.finfo(op.dtype).eps / 2 for op in (ours, theirs) if op.dtype in LOW]
            rounding = max([*halves, FACTOR * _EPS_OF_SUMS * max(ours.length, theirs.length) ** 0.5])
            apart, alone = _distance(ours.fingerprint, theirs.fingerprint), (ours.numbers.local, theirs.numbers.local)
            measures = (
                Measure(APART, (apart,), SAME + (FACTOR * (sum(so_far) + rounding) if inexact else 0.0)),
                Measure(OWN, alone, _limit(alone, rounding)),
                Measure(SO_FAR, so_far, _limit(so_far, rounding)),
            )
            over = next((f"{measure.what}: {measure}" for measure in measures if measure.is_over), "")
            dtypes = f"{ours.in_dtype} in a, {theirs.in_dtype} in b" if ours.dtype != theirs.dtype else ""
            yield Row(ours, theirs, measures, dtypes or over)
            inexact |= None in alone


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


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the relative L2 distance of two tensors, estimated from their fingerprints."""
    norm = max(a[0], b[0])
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]) * 2**0.5) / norm if norm else 0.0


def _limit(errors: tuple[float | None, float | None], rounding: float) -> float | None:
    known = [error for error in errors if error is not None and not math.isnan(error)]
    return FACTOR * min(known) + rounding if len(known) == 2 else None
