"""The order of the passes, and why."""

from __future__ import annotations

from ampcompile.config import Options

from .assign_precision import AssignPrecision
from .base import Pass
from .graph import Regions
from .insert_casts import InsertCasts


def pipeline(options: Options, regions: Regions) -> tuple[Pass, ...]:
    """Passes on the captured graph; `regions` is the autocast state around it."""
    return (
        AssignPrecision(options.policy, regions, options.range_guards),  # a captured graph, its fakes
        InsertCasts(),  # a decision on every node
    )
