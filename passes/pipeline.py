"""The order of the passes, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ampcompile.config import Options
from ampcompile.kernels import packed_linear
from ampcompile.passes.before.fold_casts import FoldCasts
from ampcompile.passes.before.hoist_weights import HoistWeights
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.before.move_casts import MoveCasts
from ampcompile.passes.before.pack_linears import PackLinears
from ampcompile.passes.before.share_casts import ShareCasts
from ampcompile.passes.before.split_casts_over_cat import SpreadCasts
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.decide.place_casts import PlaceCasts
from ampcompile.passes.fuse.fuse_cross_entropy import FuseCrossEntropy
from ampcompile.passes.fuse.fuse_linear_cast import FuseLinearCast
from ampcompile.passes.fuse.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from ampcompile.passes.fuse.fuse_norm import FuseNorm
from ampcompile.passes.fuse.matching import FusePass, Worth

from .base import Pass
from .graph import Regions


def pipeline(
    options: Options,
    regions: Regions,
    is_weight: Callable[[int, Node], bool],
    is_registered: Callable[[int, Node], bool] = lambda index, node: True,
) -> tuple[Pass, ...]:
    """Passes on the captured graph; `regions` is the autocast state around it. The others: see `HoistWeights`."""
    gradients = torch.is_grad_enabled()
    assign = AssignPrecision(options.policy, regions, options.range_guards)
    decide: tuple[Pass, ...] = (assign,)  # needs a captured graph with its fakes
    if options.placement == "bytes":
        # Needs a decision on every node; what follows from other places for all others is decided once more.
        decide += (PlaceCasts(gradients, options.lower == "inductor", is_weight), assign)
    act: tuple[Pass, ...] = (InsertCasts(),)  # needs a decision on every node
    tidy: tuple[Pass, ...] = (
        SpreadCasts(),  # before folding, which then finds parts that were widened
        FoldCasts(gradients, options.numerics == "relaxed"),  # needs every cast, ours and the user's
        MoveCasts(gradients),  # after folding, which looks through the same ops
    )
    if options.weights == "cached":
        # Needs every cast in place: what is left to cast is a weight's own.
        tidy += (HoistWeights(is_weight, is_registered),)
        if options.lower == "inductor" and not gradients and packed_linear.available(torch.bfloat16):
            tidy += (PackLinears(frozenset({torch.bfloat16})),)  # needs hoisted weights
    tidy += (ShareCasts(gradients),)  # last: a weight's copy is packed for one reader
    return decide + act + tidy


def fusion(options: Options, device_type: str) -> tuple[Pass, ...]:
    """Passes on the rewritten graph that put fused kernels in the place of whole ops, before differentiation.

    Empty where there is nothing to look for: without a GPU, unless the user names families. With `lower="eager"`
    autograd itself differentiates the graph, twice if asked, which a fused op can't be.
    """
    if options.lower == "eager" or (options.fuse == "auto" and device_type != "cuda"):
        return ()
    worth = Worth(options.fuse)
    passes: tuple[FusePass, ...] = (
        FuseLinearCrossEntropy(worth),  # before what takes either of its two ops
        FuseCrossEntropy(worth),
        FuseLinearCast(worth, torch.is_grad_enabled()),
        FuseNorm(worth),
    )
    return tuple(each for each in passes if worth.considers(each.family))
