"""Update the loss scale after an iteration, on the GPU; see `ampcompile.kernels.update_scale`."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start

CONSTANTS = Constants(num_warps=1, enable_fp_fusion=True)


@triton.jit
def float64_of(bits):
    """A float64 from its 64 bits: Triton passes Python's floats as float32."""
    return tl.cast(tl.cast(bits, tl.int64), tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["growth", "backoff", "interval", "low", "high"])
def amp_update_scale(scale, growth_tracker, skips, found_inf, growth, backoff, interval, low, high):
    """Update scale and counters in one program; arithmetic in float64, results in float32, as in torch."""
    old = tl.load(scale).to(tl.float64)
    tracker = tl.load(growth_tracker) + 1
    overflow = tl.load(found_inf) != 0.0
    due = tracker == tl.cast(interval, tl.int32)
    grown = (old * float64_of(growth)).to(tl.float32)
    grown = tl.where(tl.abs(grown) < float("inf"), grown, old.to(tl.float32))
    shrunk = (old * float64_of(backoff)).to(tl.float32)
    new = tl.where(overflow, shrunk, tl.where(due, grown, old.to(tl.float32)))
    lowest, highest = float64_of(low).to(tl.float32), float64_of(high).to(tl.float32)
    new = tl.where(new < lowest, lowest, tl.where(new > highest, highest, new))  # NaN stays NaN
    tl.store(scale, new)
    tl.store(growth_tracker, tl.where(overflow | due, 0, tracker))
    tl.store(skips, tl.where(overflow, tl.load(skips) + 1, 0))


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    skips: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """Launch one kernel; several flags are first combined by torch."""
    found_inf = found_infs[0]
    if len(found_infs) > 1:
        found_inf = torch.stack([flag.reshape(()) for flag in found_infs]).ne(0).any().float()
    settings = np.array([growth_factor, backoff_factor, min_scale, max_scale])
    growth, backoff, low, high = tables.float_bits(settings).tolist()
    with tables.on(scale.device):
        start(
            amp_update_scale,
            1,
            (scale, growth_tracker, skips, found_inf),
            (growth, backoff, growth_interval, low, high),
            CONSTANTS,
            scale.device,
        )
