"""Results of a run as JSON: by stage and job, beside the machine, the versions and the settings."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple, Self

from benchmarks.peers import AMP, BASELINE

ALIKE = " | "
"""Between the names of jobs that share an entry of a file."""
LINE = 120
"""Characters of a file's lines, where more than plain values would stand in one."""
RESULTS = Path(__file__).with_name("results")
"""Where the results that the repository keeps are."""


@dataclass(frozen=True)
class Row:
    """One peer on one case: its figures, or why there are none."""

    case: str
    peer: str
    figures: dict[str, Any] = field(default_factory=dict)
    """Times in seconds, sizes in bytes; `seconds` has one entry per round, and rounds are common to all peers."""
    why: str = ""


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    middle: float
    high: float


def spread(values: list[float]) -> Spread:
    """Median and quartiles of at least one value."""
    low, middle, high = quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return Spread(low, middle, high)


def ratios(row: Row, other: Row) -> list[float]:
    """How many times `row` is faster than `other` within each round."""
    pairs = zip(row.figures["seconds"], other.figures["seconds"], strict=True)
    return [theirs / ours for ours, theirs in pairs]


def times_faster(row: Row, other: Row) -> Spread:
    """How many times `row` is faster than `other`: of the ratios within each round, so that drift cancels."""
    return spread(ratios(row, other))


def of_bound(row: Row) -> float:
    """The share of the speed that memory allows: the median over the rounds."""
    pairs = zip(row.figures["seconds"], row.figures["bound_seconds"], strict=True)
    return spread([bound / seconds for seconds, bound in pairs]).middle


def rival(rows: dict[str, Row]) -> str | None:
    """Whom ours is compared with: Inductor under autocast, else the fastest peer that isn't ours."""
    ran = {name: row for name, row in rows.items() if not row.why and not name.startswith(AMP)}
    if BASELINE in ran or not ran:
        return BASELINE if ran else None
    return min(ran, key=lambda name: spread(ran[name].figures["seconds"]).middle)


@dataclass
class Records:
    """Results of one machine, kept in a file from job to job."""

    path: Path
    about: dict[str, Any]
    """The machine, versions and settings."""
    stages: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Stage → job → what is noted of it: of measurements rows, minutes and commit."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote."""
        content = json.loads(path.read_text())
        stages = {
            stage: {job: noted for names, noted in jobs.items() for job in names.split(ALIKE)}
            for stage, jobs in content["stages"].items()
        }
        return cls(path, content["about"], stages)

    def save(self) -> None:
        """Write the file, in one piece. Jobs of a stage of which the same is noted share an entry."""
        stages = {stage: _alike(jobs) for stage, jobs in self.stages.items()}
        written = self.path.with_suffix(".part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(_text({"about": self.about, "stages": stages}) + "\n")
        written.replace(self.path)

    def add(self, stage: str, job: str, rows: list[Row] | None = None, **more: Any) -> None:
        """Note what a job found, measured rows or other things, and save."""
        plain = [_rounded({k: v for k, v in asdict(row).items() if v}) for row in rows or ()]
        self.stages.setdefault(stage, {})[job] = more if rows is None else {**more, "rows": plain}
        self.save()

    def rows(self, stage: str | None = None) -> Iterator[tuple[str, Row]]:
        """Stage and row, of one stage or all."""
        for name, jobs in self.stages.items():
            if stage in (None, name):
                yield from ((name, Row(**row)) for job in jobs.values() for row in job["rows"])

    def cases(self, stage: str) -> dict[str, dict[str, Row]]:
        """Case → peer → row."""
        found: dict[str, dict[str, Row]] = {}
        for _, row in self.rows(stage):
            found.setdefault(row.case, {})[row.peer] = row
        return found


def _alike(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Jobs by what is noted of them, their names in one."""
    names: dict[str, list[str]] = {}
    for job, noted in jobs.items():
        names.setdefault(json.dumps(noted), []).append(job)
    return {ALIKE.join(alike): jobs[alike[0]] for alike in names.values()}


def _text(value: Any, indent: int = 0) -> str:
    """JSON; a line holds as much as fits, and of plain values all."""
    whole, items = json.dumps(value, ensure_ascii=False), value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or indent + len(whole) <= LINE:
        return whole
    if not any(isinstance(item, dict | list) for item in items):
        return whole
    names = [f"{json.dumps(name, ensure_ascii=False)}: " for name in value] if isinstance(value, dict) else []
    lines = [f"{name}{_text(item, indent + 1)}" for name, item in zip(names or [""] * len(value), items, strict=True)]
    start, end = "{}" if isinstance(value, dict) else "[]"
    space = "\n" + " " * (indent + 1)
    return f"{start}{space}{f',{space}'.join(lines)}{space[:-1]}{end}"


def _rounded(value: Any) -> Any:
    """Six digits are more than any figure here deserves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
