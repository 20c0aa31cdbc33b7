"""Cast many tensors at once, each into an existing tensor."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher, optimizers, profiling

_is_cuda = attrgetter("is_cuda")


@profiling.named("amp: cast_many_")
def cast_many_(copies: Sequence[Tensor], weights: Sequence[Tensor], tables: dict[Any, Any] | None = None) -> None:
    """Write each weight, rounded to nearest, into its copy, and raise the copies' versions; no host sync.

    `weights`: dense, of any floating dtype; `copies`: of the same shapes, strides and devices, float16 or bfloat16
    on a GPU. float64 is rounded to float32 first, as torch does. Reads a weight and writes a copy per element:
    6 bytes from float32. One launch per device and pair of dtypes; in the capture of a CUDA graph one more for every
    four weights, which writes their addresses. `tables` keeps the tables of addresses, which cost more than the
    launch, for later calls with tensors at the same addresses.
    """
    if copies and not any(map(_is_cuda, copies)):
        cast_many_reference_(copies, weights)
        return
    for device in dict.fromkeys(copy.device for copy in copies):
        indices = [i for i, copy in enumerate(copies) if copy.device == device]
        _cast_on(device, [copies[i] for i in indices], [weights[i] for i in indices], tables)


def cast_many_reference_(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """`cast_many_` in plain torch, as it runs on the CPU, at the speed of memory."""
    with torch.no_grad(), dispatcher.without_modes():
        optimizers.copy_(copies, weights)


def _cast_on(
    device: torch.device, copies: Sequence[Tensor], weights: Sequence[Tensor], tables: dict[Any, Any] | None
) -> None:
    if device.type == "cuda":
        from .triton import cast_many as gpu

        resolved = [weight.resolve_neg() for weight in weights]  # it reads memory
        gpu.cast_many_(copies, resolved, {} if tables is None else tables)
        torch.autograd.graph.increment_version(list(copies))
    else:
        cast_many_reference_(copies, weights)
