"""The regression guard: two result files of one machine, and whether the newer one is worse."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import AMP
from benchmarks.records import Records, Row, rival, times_faster

STEADY = ("peak_bytes", "casts", "cast_bytes", "graphs", "host_syncs", "launches", "recompiled")
"""Figures that don't depend on how busy the machine is."""


@dataclass(frozen=True)
class Change:
    """A figure of ours that differs between the runs by more than its tolerance."""

    stage: str
    case: str
    peer: str
    figure: str
    old: float
    new: float
    worse: bool

    def __str__(self) -> str:
        verdict = "WORSE" if self.worse else "better"
        return f"{verdict}: {self.stage}, {self.case}, {self.peer}: {self.figure} {self.old:.4g}, now {self.new:.4g}"


def changes(old: Records, new: Records, tolerance: float) -> Iterator[Change]:
    """What differs in the rows of ours that both runs have.

    Times are compared as multiples of a rival's in the same run, so that a busier or cooler machine doesn't count;
    and only if the quartiles of the two runs don't overlap. A row that fails now is worse.
    """
    for stage in old.stages.keys() & new.stages.keys():
        before, after = old.cases(stage), new.cases(stage)
        for case in before.keys() & after.keys():
            for peer in (name for name in before[case].keys() & after[case].keys() if name.startswith(AMP)):
                for figure, was, now, worse in _differences(before[case], after[case], peer, tolerance):
                    yield Change(stage, case, peer, figure, was, now, worse)


Difference = tuple[str, float, float, bool]


def _differences(old: dict[str, Row], new: dict[str, Row], peer: str, tolerance: float) -> Iterator[Difference]:
    if bool(old[peer].why) != bool(new[peer].why):
        yield "failures", float(bool(old[peer].why)), float(bool(new[peer].why)), bool(new[peer].why)
    if old[peer].why or new[peer].why:
        return
    other = rival(old)
    if other in new and not new[other].why:
        was, now = (times_faster(rows[peer], rows[other]) for rows in (old, new))
        apart = now.high < was.low or was.high < now.low
        if apart and abs(now.middle / was.middle - 1) > tolerance:
            yield f"times as fast as {other}", was.middle, now.middle, now.middle < was.middle
    for figure in STEADY:
        before, after = (row.figures.get(figure) for row in (old[peer], new[peer]))
        if before is not None and after is not None and abs(after - before) > tolerance * before:
            yield figure, before, after, after > before


def main(arguments: list[str]) -> int:
    """Print what changed; 1 if something got worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, help="share that doesn't count (default %(default)s)")
    options = parser.parse_args(arguments)
    old, new = Records.load(options.old), Records.load(options.new)
    if different := {
        key for key in ("device", "processor", "gpu", "cores") if old.about.get(key) != new.about.get(key)
    }:
        parser.error(f"the files differ in {', '.join(sorted(different))}: only runs of one machine can be compared")
    found = sorted(changes(old, new, options.tolerance), key=lambda change: (not change.worse, str(change)))
    print("\n".join(map(str, found)) or "nothing changed")
    return int(any(change.worse for change in found))
