"""The placeholder op for the magnitudes in a watched graph: an input and an output, until the joint graph has them."""

from typing import Any

import torch

SLOTS = 1024  # values that one graph can watch in each direction


@torch.library.custom_op("ampcompile::watched", mutates_args=())
def watched(slots: torch.Tensor, backward: bool) -> torch.Tensor:
    """The magnitudes of forward, or of backward: `RecordMagnitudes` replaces the op by what computes them.

    Its gradient is the op again, so that backward returns its magnitudes as the gradient of `slots`. Where autograd
    itself differentiates the graph, the op runs, and returns `slots`, which are zeros.
    """
    return slots.clone()


@watched.register_fake
def _(slots: torch.Tensor, backward: bool) -> torch.Tensor:
    return torch.empty_like(slots)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return watched(grad, True), None


watched.register_autograd(_backward)
WATCHED = torch.ops.ampcompile.watched.default
