"""What was found, case by case, as JSON lines in proof/results/: one file for each part, or for each shard of one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine

RESULTS = Path(__file__).with_name("results")
"""Where the results that the repository keeps are."""


class Failure(NamedTuple):
    """What doesn't hold. `kind`: a word to file it under; `stock`: stock AOTAutograd under autocast fails likewise."""

    kind: str
    text: str
    stock: bool = False
    times: int = 1


@dataclass(frozen=True)
class Verdict:
    """What one group of cases gave: how many by outcome, and what failed."""

    group: str
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    """What was measured, where only many groups together show what holds."""


@dataclass
class Results:
    """Verdicts of one part in one file, each written when it is there."""

    path: Path
    about: list[dict[str, Any]] = field(default_factory=list)
    """Versions and machine of each run that wrote here."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file; one that isn't there is empty, and of a line that was cut off nothing is kept."""
        found = cls(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                content = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "about" in content:
                found.about.append(content["about"])
            else:
                failures = [Failure(**failure) for failure in content.pop("failures", ())]
                found.verdicts[content["group"]] = Verdict(**content, failures=failures)
        return found

    def begin(self, about: dict[str, Any]) -> None:
        """Note who writes from here on."""
        if about not in self.about:
            self.about.append(about)
            self._write({"about": about})

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict, on disk too."""
        self.verdicts[verdict.group] = verdict
        failures = [failure._asdict() for failure in verdict.failures]
        self._write({name: value for name, value in (*vars(verdict).items(), ("failures", failures)) if value})

    def _write(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a") as file:
            file.write("" if whole else "\n")
            file.write(json.dumps(content, ensure_ascii=False) + "\n")


def name_of(part: str, shard: tuple[int, int]) -> str:
    """The file of a part's shard."""
    return f"{part}.jsonl" if shard[1] == 1 else f"{part}.{shard[0]}of{shard[1]}.jsonl"


def of_part(part: str, folder: Path = RESULTS) -> Iterator[Results]:
    """Everything that is known of a part."""
    for path in sorted(folder.glob(f"{part}.*jsonl")):
        yield Results.load(path)


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
    keep = ("processor", "low-precision instructions", "system", "python")
    versions = {name: found["packages"][name] for name in ("torch", "ampcompile")}
    return {name: found[name] for name in keep} | versions | {"commit": machine.commit()}
