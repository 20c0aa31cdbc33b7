"""The order of the passes, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ampcompile.config import Options
from ampcompile.kernels import packed_linear

from .assign_precision import AssignPrecision
from .base import Pass
from .graph import Regions
from .hoist_weights import HoistWeights
from .insert_casts import InsertCasts
from .pack_linears import PackLinears


def pipeline(options: Options, regions: Regions, is_weight: Callable[[int, Node], bool]) -> tuple[Pass, ...]:
    """Passes on the captured graph; `regions` is the autocast state around it."""
    decide_and_act: tuple[Pass, ...] = (
        AssignPrecision(options.policy, regions, options.range_guards),  # needs a captured graph with its fakes
        InsertCasts(),  # needs a decision on every node
    )
    tidy: tuple[Pass, ...] = ()
    if options.weights == "cached":
        tidy = (HoistWeights(is_weight),)  # needs every cast in place: what is left to cast is a weight's own
        if options.lower == "inductor" and packed_linear.available(torch.bfloat16):
            tidy += (PackLinears(frozenset({torch.bfloat16}), torch.is_grad_enabled()),)  # needs hoisted weights
    return decide_and_act + tidy
