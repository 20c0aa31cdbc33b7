"""Check all gradients in one read: infinite or NaN once unscaled, their norm, the factor that clips them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.torch_private import profiling

from . import native


class Checked(NamedTuple):
    """The result of `check_grads`; all 0-dim float32 on the device of the gradients."""

    found_inf: Tensor
    """1 if a gradient, scaled or unscaled, is infinite or NaN, or if the scale can't be undone; else 0."""
    multiplier: Tensor
    """The factor for the gradients: unscales them and, with `max_norm`, clips them."""
    norm: Tensor
    """L2 norm of all gradients, unscaled and not yet clipped."""


@profiling.named("amp: check_grads")
def check_grads(
    grads: Sequence[Tensor],
    scale: Tensor | None = None,
    multiplier: Tensor | None = None,
    max_norm: float | None = None,
    workspace: dict[str, Any] | None = None,
    same: object = None,
) -> Checked:
    """Check gradients and take their norm in one pass that changes none of them; no host sync.

    `grads`: dense float32, float16 or bfloat16 on one device, at least one. They count as multiplied by
    `multiplier` and divided by `scale` (0-dim float32, each one if None). `max_norm` clips as
    `torch.nn.utils.clip_grad_norm_` does, in float32 whatever the gradients' type. `workspace` keeps a GPU's
    buffers between calls. Pass the same object as `same` as in an earlier call with that workspace only if all
    gradients are at the same addresses, with the same types. Reads the size of a gradient per element, writes nothing.
    """
    if grads[0].is_cuda:
        from .triton import check_grads as gpu

        workspace = {} if workspace is None else workspace
        return Checked(*gpu.check_grads(grads, scale, multiplier, max_norm, workspace, same))
    result = torch.empty(3, device="cpu")
    native.call(
        "check_grads",
        len(grads),
        native.sizes(grads),
        native.addresses(grads),
        native.dtype_codes(grads),
        scale,
        multiplier,
        None if max_norm is None else native.np.array(max_norm, dtype=native.np.float64),
        result,
    )
    return Checked(*result.unbind())


def check_grads_reference(
    grads: Sequence[Tensor],
    scale: Tensor | None = None,
    multiplier: Tensor | None = None,
    max_norm: float | None = None,
) -> Checked:
    """`check_grads` in plain torch."""
    one = torch.ones((), device=grads[0].device)
    inverse = one if scale is None else scale.double().reciprocal().float()
    factor = inverse if multiplier is None else inverse * multiplier
    products = [grad.float() * factor for grad in grads]
    finite = torch.stack([product.isfinite().all() for product in products]).all() & (inverse != 0)
    norm = torch.stack([product.double().square().sum() for product in products]).sum().sqrt().float()
    shrink = one if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1)
    return Checked((~finite).float(), factor * shrink, norm)
