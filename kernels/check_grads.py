"""Check all gradients in one read: infinite or NaN once unscaled, their norm, the factor that clips them."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.torch_private import marks

from . import native, tables
from .step import grad_table
from .tables import GradTable


class Checked(NamedTuple):
    """The result of `check_grads`; all 0-dim float32 on the device of the gradients."""

    found_inf: Tensor
    """1 if a gradient, scaled or unscaled, is infinite or NaN, or if the scale can't be undone; else 0."""
    multiplier: Tensor
    """The factor for the gradients: unscales them and, with `max_norm`, clips them."""
    norm: Tensor
    """L2 norm of all gradients, unscaled and not yet clipped."""
    digest: Tensor
    """A sum of them with weights, by which they are known again: other gradients of this norm have another."""


def check_grads(
    grads: Sequence[Tensor] | GradTable,
    scale: Tensor | None = None,
    multiplier: Tensor | None = None,
    max_norm: float | Tensor | None = None,
    workspace: dict[str, Any] | None = None,
) -> Checked:
    """Check gradients and take their norm in one pass that changes none of them; no host sync.

    `grads`: dense float32, float16 or bfloat16 on one device, at least one, or their table. They count as multiplied by
    `multiplier` and divided by `scale` (0-dim float32, each one if None). `max_norm` clips as
    `torch.nn.utils.clip_grad_norm_` does, in float32 whatever the gradients' type; on the gradients' device a
    tensor is read there. `workspace` keeps a GPU's buffers between calls. Reads the size of a gradient per element,
    writes nothing.
    """
    table = grads if isinstance(grads, GradTable) else grad_table(grads)
    if isinstance(max_norm, Tensor) and max_norm.device == table.device:
        checked = check_grads(table, scale, multiplier, None, workspace)
        shrink = max_norm.detach().reshape(()).double() / (checked.norm.double() + 1e-6)
        return checked._replace(multiplier=checked.multiplier * shrink.clamp(max=1).float())
    max_norm = None if max_norm is None else float(max_norm)
    with marks.region("amp: check_grads"):
        if tables.by_triton(table.device):
            from .triton import loss_scaling as gpu

            return Checked(*gpu.check_grads(table, scale, multiplier, max_norm, {} if workspace is None else workspace))
        result = torch.empty(4, dtype=torch.float32, device="cpu")
        limit = ctypes.c_double(0.0 if max_norm is None else max_norm)
        limit_at = None if max_norm is None else ctypes.addressof(limit)
        native.call("check_grads", len(table.numels), table.place, scale, multiplier, limit_at, result)
        return Checked(*result.unbind())
