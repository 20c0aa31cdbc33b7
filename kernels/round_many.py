"""Round many tensors to 16-bit types at once, each into an existing float32 tensor (CPU)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.torch_private import profiling

from . import unchanged
from .renewal import round_all


@profiling.named("amp: round_many_")
def round_many_(copies: Sequence[Tensor], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Write each weight, rounded to nearest in its dtype, into its copy, as float32; raise the copies' versions.

    `weights`: dense, of any floating dtype; `copies`: float32 of the same shapes and strides. Other types than
    float32 are rounded to it first, as torch does. Reads and writes 4 bytes an element.
    """
    if not copies:
        return
    weights = [weight.float() for weight in weights]
    if unchanged.available():
        round_all([weight.data_ptr() for weight in weights], copies, dtypes)
    else:
        round_many_reference_(copies, weights, dtypes)


def round_many_reference_(copies: Sequence[Tensor], weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """`round_many_` in plain torch, through a 16-bit tensor."""
    for copy, weight, dtype in zip(copies, weights, dtypes, strict=True):
        copy.copy_(weight.to(dtype))
