"""Update the loss scale after an iteration: shrink it after an overflow, grow it after enough iterations without."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.torch_private import marks, optimizers

from . import native, tables


@marks.named("amp: update_scale_")
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
    """Update `scale` (float32) and `growth_tracker` (int32) as `torch.amp.GradScaler` does, then keep the scale
    within `[min_scale, max_scale]`; count overflows in a row in `skips` (int32); no host sync.

    All are one element on one device. Any nonzero tensor in `found_infs` is an overflow; they are or'ed, not summed.
    """
    settings = growth_factor, backoff_factor, growth_interval, min_scale, max_scale
    if tables.by_triton(scale.device):
        from .triton import loss_scaling as gpu

        gpu.update_scale_(scale, growth_tracker, skips, found_infs, *settings)
        return
    if native.available() and all(tensor.dtype == torch.float32 for tensor in (scale, *found_infs)):
        numbers = (ctypes.c_double * 5)(*settings)
        flags = tables.addresses(found_infs)
        native.call("update_scale", len(found_infs), scale, growth_tracker, skips, flags, ctypes.addressof(numbers))
        return
    found_inf = found_infs[0] if len(found_infs) == 1 else torch.stack([f.reshape(()) for f in found_infs]).ne(0).any()
    optimizers.update_scale_(scale, growth_tracker, found_inf.float(), growth_factor, backoff_factor, growth_interval)
    scale.clamp_(min_scale, max_scale)
    skips.add_(1).mul_(found_inf.ne(0))
