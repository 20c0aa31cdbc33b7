"""The interface of every part of the proof: groups of cases to run, and a table of what came of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proof.results import Verdict

HOMES = {
    "ops": "proof.ops.parts.OPERATORS",
    "mixed": "proof.ops.parts.MIXED",
    "in_place": "proof.ops.parts.IN_PLACE",
    "inductor": "proof.ops.parts.INDUCTOR",
    "models": "proof.models.sweep.PART",
    "convergence": "proof.convergence.sweep.PART",
    "masters": "proof.convergence.masters.PART",
    "codes": "proof.convergence.codes.PART",
    "states": "proof.convergence.states.PART",
    "saved": "proof.convergence.saved.PART",
}
"""Part → where it is, in the order in which they run and are shown."""


@dataclass(frozen=True)
class Part:
    """A part of the proof."""

    title: str
    says: str
    """The rules by which a case holds."""
    groups: Callable[[bool], list[str]]
    """Names of groups of cases, always the same: all of them, or those of the default sample."""
    run: Callable[[str], Verdict]
    """Tries all cases of a group. Called in a process of its own, which serves many groups."""
    tabulate: Callable[[Sequence[Verdict]], str]
    """The results of all groups together."""
    seconds: float = 600.0
    """How long one group may take."""


def load_part(name: str) -> Part:
    """The part of that name."""
    module, _, attribute = HOMES[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)
