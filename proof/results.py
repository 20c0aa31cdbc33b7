"""Results, group by group, in proof/results/: one file of records for each part, or for each shard of one."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.records import Records

RESULTS = Path(__file__).with_name("results")
"""The results that the repository keeps."""


class Failure(NamedTuple):
    """A failed case. `kind`: a word to file it under; `stock`: stock AOTAutograd under autocast fails likewise."""

    kind: str
    text: str
    stock: bool = False
    times: int = 1


@dataclass(frozen=True)
class Verdict:
    """The verdict on one group of cases: how many by outcome, and what failed."""

    group: str
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    """Measurements, where only many groups together show what holds."""

    @property
    def place(self) -> tuple[str, str]:
        """Stage and job in a file of records: the group's setting, and what stands before the first comma."""
        name, _, setting = self.group.partition(", ")
        return setting, name

    def noted(self) -> dict[str, Any]:
        """The fields of a record, without its name and without empty ones."""
        return {name: value for name, value in vars(self).items() if value and name != "group"}


def read_verdicts(files: Iterable[Records]) -> list[Verdict]:
    """Of all files, by group."""
    found = []
    for records in files:
        for setting, jobs in records.stages.items():
            for name, noted in jobs.items():
                failures = [Failure(*failure) for failure in noted.get("failures", ())]
                group = f"{name}, {setting}" if setting else name
                found.append(Verdict(group, noted.get("counts", {}), failures, noted.get("figures", {})))
    return sorted(found, key=lambda verdict: verdict.group)


def open_records(path: Path, about: dict[str, Any] | None = None) -> Records:
    """The file of records at `path`, or an empty one; `about` joins those who found what is there."""
    records = Records.load(path) if path.exists() else Records(path, {"runs": []})
    if about and about not in records.about["runs"]:
        records.about["runs"].append(about)
    return records


def name_file(part: str, shard: tuple[int, int]) -> str:
    """The file of a part's shard."""
    return f"{part}.json" if shard[1] == 1 else f"{part}.{shard[0]}of{shard[1]}.json"


def find_records(part: str, folder: Path = RESULTS) -> Iterator[Records]:
    """Everything that is known of a part."""
    for path in sorted(folder.glob(f"{part}.*json")):
        yield Records.load(path)


def shard(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4)."""
    index, _, count = text.partition("/")
    found = int(index), int(count)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"found {text}, expected I/N with 1 <= I <= N")
    return found


def about() -> dict[str, Any]:
    """Versions and machine."""
    found = machine.about("cpu")
    keep = ("processor", "low-precision instructions", "system", "python", "commit")
    return {name: found[name] for name in keep} | {"torch": found["packages"]["torch"]}
