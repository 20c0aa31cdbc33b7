"""All passes in the order in which they run, by phase; a comment says what a pass needs from earlier ones.

The phase `pipeline` works on a graph that `capture` made of one of Dynamo's, `after` on the joint graph of forward and
backward, `replay` on a graph that torch's own autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ampcompile.config import Options
from ampcompile.dtypes import LOW
from ampcompile.kernels import packed_linear
from ampcompile.passes.after.add_embedding_gradients import AddEmbeddingGradients
from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.passes.after.drop_casts import DropCasts
from ampcompile.passes.after.recompute_casts import RecomputeCasts
from ampcompile.passes.after.save_old_values import SaveOldValues
from ampcompile.passes.after.widen_late import WidenLate
from ampcompile.passes.after.widen_products import WidenProducts
from ampcompile.passes.after.widen_weight_gradients import WidenWeightGradients
from ampcompile.passes.after.write_for_products import WriteForProducts
from ampcompile.passes.after.write_roundings import WriteRoundings
from ampcompile.passes.analysis.products import NO_PRODUCTS, WideProducts
from ampcompile.passes.before.fold_casts import FoldCasts
from ampcompile.passes.before.hoist_weights import HoistWeights
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.before.pack_weights import PackWeights
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.replay import BindWeightsEagerly, EnableSecondBackward
from ampcompile.passes.share_casts import ShareCasts, ShareEveryCast

from .base import Pass
from .graph import Regions

if TYPE_CHECKING:
    from ampcompile.passes.after.record_magnitudes import WatchedValue


def pipeline(
    options: Options,
    regions: Regions,
    copied: Mapping[Node, bool] = MappingProxyType({}),
    gathered: Mapping[Node, bool] = MappingProxyType({}),
) -> tuple[Pass, ...]:
    """Passes on the captured graph: decide dtypes, insert casts, tidy them, and hoist those of weights.

    `regions` is the autocast state around the graph. `copied`: see `HoistWeights`; `gathered`: `QuantizeProducts`.
    """
    gradients = torch.is_grad_enabled()
    passes: tuple[Pass, ...] = (
        # Needs a captured graph with its fakes.
        AssignPrecision(options.policy, regions, options.range_guards, options.products),
        InsertCasts(),  # needs a decision on every node
        FoldCasts(gradients, options.numerics == "relaxed"),  # needs all casts, ours and the user's
    )
    if options.policy.asks_fp8():
        from ampcompile.passes.before.quantize_products import QuantizeProducts  # defines ops that few need

        passes += (QuantizeProducts(gathered),)  # needs casts, some of which it replaces
    if options.weights == "cached":
        # Needs all casts in their final places: those that still read a weight are the weight's own.
        wide = WideProducts.on_this_cpu(options)
        passes += (HoistWeights(copied, wide, frozenset(gathered)),)
        asserting = dict(options.inductor).get("size_asserts")  # of strides, which an opaque tensor hasn't
        if options.lower == "inductor" and not gradients and not asserting:
            packed = frozenset(dtype for dtype in (*LOW, torch.float32) if packed_linear.available(dtype))
            if packed:  # needs hoisted weights
                passes += (PackWeights(packed, not wide.small, options.numerics == "relaxed"),)
    return (*passes, ShareCasts(gradients))  # last: a weight's copy is packed for one reader


def after(wide: WideProducts = NO_PRODUCTS, watched: list[WatchedValue] | None = None) -> tuple[Pass, ...]:
    """Passes on the joint graph of forward and backward, or on forward alone where no gradients are needed.

    The sums of gradients are explicit nodes there, so merging two casts doesn't merge their gradients any more.
    `wide`: the products that run in float32 on the CPU.
    `watched`: gets the values whose statistics a watched graph computes; None if it isn't watched.
    """
    passes: tuple[Pass, ...] = (
        BindWeights(),  # first: the other passes expect copies of weights as plain inputs
        DropCasts(),  # before sharing: it looks only through values with one reader
        WidenLate(),  # after dropping: moves only the widening casts that are left
        WidenWeightGradients(wide.all | wide.dense),  # after dropping: needs the casts of gradients that are left
        *([WidenProducts(wide)] if wide else []),  # after it: float32 gradients stay unrounded
        ShareEveryCast(),  # needs all casts, and at most one tensor for each value
        AddEmbeddingGradients(),  # after widening: a product written in float32 may be added to
        WriteForProducts(),  # needs all casts in their final places
        RecomputeCasts(),  # marks the casts that are left
        SaveOldValues(),  # its marks override those that ask for recomputation
    )
    if watched is not None:
        from ampcompile.passes.after.record_magnitudes import RecordMagnitudes  # here: it defines an op that few need

        passes += (RecordMagnitudes(watched),)  # its reads must not change what others do
    return (*passes, WriteRoundings())  # last: the others look for ops on 16-bit numbers


def replay() -> tuple[Pass, ...]:
    """Passes on a rewritten graph that torch's own autograd differentiates, once or more, as it runs."""
    return (
        EnableSecondBackward(),  # needs custom functions as capture left them
        BindWeightsEagerly(),  # needs hoisted weights; turns nested regions into calls that autograd traces
    )
