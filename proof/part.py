"""What every part of the proof brings: groups of cases to run, and a chapter of the page."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from proof.results import Verdict

HOMES = {
    "ops": "proof.ops.sweep",
    "mixed": "proof.ops.mixed",
    "in_place": "proof.ops.in_place",
    "inductor": "proof.ops.inductor",
    "models": "proof.models.sweep",
    "convergence": "proof.convergence.sweep",
    "fuzz": "proof.fuzz.sweep",
    "faults": "proof.faults.sweep",
}
"""Part → module whose `PART` it is, in the order in which they run and stand on the page."""


class Part(Protocol):
    """A part of the proof."""

    title: str
    says: str
    """What the page says of the rules."""
    seconds: float
    """How long one group may take."""

    def groups(self, everything: bool) -> list[str]:
        """Names of groups of cases, always the same; without `everything`, those of the default sample."""

    def run(self, group: str) -> Verdict:
        """Try all cases of a group. Called in a process of its own, which serves many groups."""

    def tabulate(self, verdicts: Sequence[Verdict]) -> str:
        """What came of all groups together, for the page."""


def part(name: str) -> Part:
    """The part of that name."""
    return importlib.import_module(HOMES[name]).PART
