"""Unscale gradients in place, as `unscale_` does: by our kernel where it can, else by torch's."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.unscale import unscale_
from ampcompile.torch_private import foreach

from .conditions import GRAD_DTYPES, NotFusedError, dense, require_kernels, require_no_overlap


def unscale_grads(
    optimizer: Any,
    multiplier: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
    workspaces: dict[torch.device, dict[str, Any]],
) -> dict[torch.device, Tensor]:
    """Multiply all gradients in place; return an overflow flag per device that has some, copied from `found_inf`.

    Checks all gradients before it changes one. A gradient overflows if it is infinite or NaN before or after.
    """
    kinds: dict[tuple[torch.device, torch.dtype, type], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}")
            if param.grad is not None:
                grad = values(param, allow_fp16)
                kinds[grad.device, grad.dtype, type(grad)].append(grad)
    factors: dict[torch.device, Tensor] = {}
    flags: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _, _), grads in kinds.items():
            if device not in flags:
                factors[device] = multiplier.to(device, non_blocking=True)
                flags[device] = found_inf.to(device, non_blocking=True, copy=True)
            if has_kernel(grads):
                unscale_(grads, factors[device], flags[device], workspaces.setdefault(device, {}))
            else:
                unscale_by_torch(grads, factors[device], flags[device])
    return flags


def values(param: Tensor, allow_fp16: bool) -> Tensor:
    """The dense values of a parameter's gradient."""
    grad = param.grad
    assert grad is not None
    if not allow_fp16 and grad.dtype == torch.float16:
        raise ValueError("Attempting to unscale FP16 gradients.")
    if not grad.is_sparse:
        return grad
    if grad.dtype == torch.float16:  # entries of one index may overflow in their sum only
        with torch.no_grad():
            grad = param.grad = grad.coalesce()
    return grad._values()


def has_kernel(grads: list[Tensor]) -> bool:
    """Return True if our kernel takes these gradients of one device and type."""
    first = grads[0]
    if type(first) is not Tensor or first.dtype not in GRAD_DTYPES:
        return False
    try:
        require_kernels({first.device.type})
        require_no_overlap(grads)
    except NotFusedError:
        return False
    return all(dense(grad) and not grad.is_neg() for grad in grads)


def unscale_by_torch(grads: list[Tensor], multiplier: Tensor, found_inf: Tensor) -> None:
    """Unscale by `torch.amp.GradScaler`'s op, which takes every layout, and for DTensors asks all ranks. It checks
    scaled gradients only, so it runs again on unscaled ones. A multiplier of 0, of an infinite scale, is an overflow.
    """
    foreach.check_and_unscale_(grads, found_inf, multiplier)
    foreach.check_and_unscale_(grads, found_inf, torch.ones_like(multiplier))
    found_inf.copy_(torch.where(multiplier.reshape(found_inf.shape) == 0, 1.0, found_inf))
