"""Cast many tensors at once, each into an existing tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher, marks, optimizers

from . import tables


@marks.named("amp: cast_many_")
def cast_many_(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Write each weight, rounded to nearest, into its copy, and raise the copies' versions; no host sync.

    `weights`: dense, of any floating dtype; `copies`: of the same shapes, strides and devices, float16 or bfloat16
    on a GPU. float64 is rounded to float32 first, as torch does. Reads a weight and writes a copy per element:
    6 bytes from float32. One launch per device and pair of dtypes; in the capture of a CUDA graph some more, which
    write the weights' addresses: one, and another for each 24 of them.
    """
    for device in dict.fromkeys(copy.device for copy in copies):
        pairs = [(copy, weight) for copy, weight in zip(copies, weights, strict=True) if copy.device == device]
        if tables.by_triton(device):
            from .triton import cast_many as gpu

            chosen = [copy for copy, _ in pairs]
            gpu.cast_many_(chosen, [weight.resolve_neg() for _, weight in pairs])  # it reads memory
            torch.autograd.graph.increment_version(chosen)
        else:  # at the speed of memory
            with torch.no_grad(), dispatcher.without_modes():
                optimizers.copy_(*map(list, zip(*pairs, strict=True)))
