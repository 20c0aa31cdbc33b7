"""Results of the suite on each torch and Python that it ran on, file by file: written by pytest, shown by the page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.records import Records
from benchmarks.report.tables import table
from proof.results import RESULTS, about

NAME = "versions.json"
SAYS = """`make matrix` runs the suite's core, all but the tests of benchmarks, of examples and of this proof, on the
oldest torch, the newest and the pinned one, and notes what came of each file; `SHARD=1/4` runs every fourth file. What
`+cpu` isn't said of is a build for CUDA; there was no GPU. Skipped is what needs one, or a package or a unit of the CPU
that isn't there.
"""
PYTHONS = "3.11", "3.12", "3.13", "3.14"
"""Those that the package allows."""
COUNTS = "passed", "skipped", "failed"
Outcome = tuple[str, str]
"""A test's id and what came of it: one of COUNTS."""


def note(folder: Path, outcomes: Iterable[Outcome]) -> None:
    """Keep what came of a run of some files, instead of what was known of them for this torch and this Python."""
    facts = about()
    path, version = folder / NAME, f"torch {facts['torch']}, Python {facts['python']}"
    known = Records.load(path) if path.exists() else Records(path, {})
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test, outcome in outcomes:
        found[test.partition("::")[0]][outcome] += 1
    files = known.stages.get(version, {}) | found
    known.about = dict(sorted({**known.about, version: facts}.items()))
    known.stages = dict(sorted({**known.stages, version: dict(sorted(files.items()))}.items()))
    known.save()


def chapter(folder: Path = RESULTS) -> Iterator[str]:
    """The chapter's paragraphs; none without results."""
    path = folder / NAME
    if not path.exists():
        return
    yield "## Versions\n"
    yield SAYS
    known = Records.load(path)
    rows = []
    for version, files in known.stages.items():
        counts: Counter[str] = sum(map(Counter, files.values()), Counter())
        facts = known.about[version]
        units = ", ".join(facts["low-precision instructions"]) or "no 16-bit units"
        figures = (len(files), *(counts[name] for name in COUNTS))
        rows.append((version, f"{facts['processor']}, {units}", *map(str, figures), facts["commit"]))
    yield table(["", "on", "files", *COUNTS, "commit"], rows)
    if never := [python for python in PYTHONS if not any(f"Python {python}." in version for version in known.stages)]:
        yield f"Allowed, but not run so far: Python {' and '.join(never)}.\n"
