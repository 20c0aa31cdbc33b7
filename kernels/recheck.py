"""Compare copies of weights with samples of the weights, and cast again where they differ."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import profiling

CHUNK = 8192
"""Elements of a chunk, which is cast again as a whole."""
SAMPLE = 128
"""Elements compared in each chunk: four runs, its first and its last elements among them."""


@profiling.named("amp: recheck_")
def recheck_(
    copies: Sequence[Tensor],
    weights: Sequence[Tensor],
    changed: Tensor,
    mark: int,
    rewrite: bool,
    workspace: dict[int, Any] | None = None,
    tables: dict[Any, Any] | None = None,
) -> None:
    """Raise `changed` to `mark` if a sample of a weight differs from its copy; with `rewrite` cast such chunks again.

    Finds writes of whole tensors without a version bump, but not changes between the samples. `changed`: one int32 on
    the same device, never lowered. NaN equals NaN. No host sync. `workspace` is for calls with the same tensors at the
    same addresses only; `tables` is that of `cast_many_`. Reads 6 bytes of each 384 (of float32), and usually writes
    nothing.
    """
    if copies[0].is_cuda:
        from .triton import recheck as gpu

        workspace = {} if workspace is None else workspace
        row_tables = {} if tables is None else tables
        gpu.recheck_(copies, weights, changed, mark, rewrite, workspace, row_tables, CHUNK, SAMPLE)
    else:
        recheck_reference_(copies, weights, changed, mark, rewrite)


def recheck_reference_(
    copies: Sequence[Tensor], weights: Sequence[Tensor], changed: Tensor, mark: int, rewrite: bool
) -> None:
    """`recheck_` in plain torch, with a sync for every chunk."""
    for copy, weight in zip(copies, weights, strict=True):
        for low, full in zip(_memory(copy).split(CHUNK), _memory(weight).split(CHUNK), strict=True):
            places = _sampled(len(low), low.device)
            expected, held = full[places].to(low.dtype), low[places]
            differs = expected.view(torch.int16) != held.view(torch.int16)
            if (differs & ~(expected.isnan() & held.isnan())).any():
                changed.clamp_(min=mark)
                if rewrite:
                    low.copy_(full)


def _memory(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _sampled(size: int, device: torch.device) -> Tensor:
    """Indices of the elements of a chunk that are compared: all of a small chunk."""
    lanes = torch.arange(min(size, SAMPLE), device=device)
    if size <= SAMPLE:
        return lanes
    run = SAMPLE // 4
    return lanes // run * (size - run) // 3 + lanes % run
