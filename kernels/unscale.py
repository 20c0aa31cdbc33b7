"""Multiply gradients in place by the inverse of the loss scale, and check them for infinities and NaNs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ampcompile.torch_private import marks

from . import native, tables
from .step import grad_table


@marks.named("amp: unscale_")
def unscale_(
    grads: Sequence[Tensor], multiplier: Tensor, found_inf: Tensor, workspace: dict[str, Any] | None = None
) -> None:
    """Multiply gradients in place; set `found_inf` to 1 if one is infinite or NaN before or after; no host sync.

    `grads`: dense float32, float16 or bfloat16 on one device, at least one; products are rounded once.
    `multiplier`, `found_inf`: one float32 element each, on the same device. A multiplier of one changes no bits, one
    of zero counts as an overflow (the scale was infinite); `found_inf` is never cleared.
    Reads and writes the size of a gradient per element.
    """
    table = grad_table(grads)
    if tables.by_triton(table.device):
        from .triton import loss_scaling as gpu

        gpu.unscale_(table, multiplier, found_inf, {} if workspace is None else workspace)
    else:
        native.call("unscale", len(grads), table.place, multiplier, found_inf)
