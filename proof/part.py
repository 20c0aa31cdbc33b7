"""The interface of every part of the proof: groups of cases to run, and a chapter of the page."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proof.results import Verdict, about

HOMES = {
    "ops": "proof.ops.parts.OPERATORS",
    "mixed": "proof.ops.parts.MIXED",
    "in_place": "proof.ops.parts.IN_PLACE",
    "inductor": "proof.ops.parts.INDUCTOR",
    "models": "proof.models.sweep.PART",
    "convergence": "proof.convergence.sweep.PART",
    "masters": "proof.convergence.masters.PART",
    "fuzz": "proof.fuzz.sweep.PART",
    "faults": "proof.faults.sweep.PART",
    "dashboard": "proof.dashboard.sweep.PART",
}
"""Part → where it is, in the order in which they run and stand on the page."""
BY_NAME_ALONE = {"dashboard"}
"""Parts that run only if they are named."""


@dataclass(frozen=True)
class Part:
    """A part of the proof."""

    title: str
    says: str
    """The rules, as the page states them."""
    groups: Callable[[bool], list[str]]
    """Names of groups of cases, always the same: all of them, or those of the default sample."""
    run: Callable[[str], Verdict]
    """Tries all cases of a group. Called in a process of its own, which serves many groups."""
    tabulate: Callable[[Sequence[Verdict]], str]
    """The results of all groups together, for the page."""
    seconds: float = 600.0
    """How long one group may take."""
    about: Callable[[], dict[str, Any]] = about
    """The machine and the versions that the page names."""
    missing: Callable[[], str] = str
    """The packages that it lacks here, and how to get them; empty if none."""


def part(name: str) -> Part:
    """The part of that name."""
    module, _, attribute = HOMES[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)
