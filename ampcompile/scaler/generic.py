"""A step of any optimizer, as `torch.amp.GradScaler` takes it."""

import inspect
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .plan import amp_aware, any_set


def generic_step(
    scaler: torch.amp.GradScaler, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Unscale and check if that wasn't done, then step unless there was an overflow; that costs a host sync."""
    if amp_aware(optimizer):
        return self_skipping_step(scaler, optimizer, state, args, kwargs)
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    if not state["found_inf_per_device"]:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    return scaler._maybe_opt_step(optimizer, state, *args, **kwargs)


def self_skipping_step(
    scaler: torch.amp.GradScaler, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Step an optimizer that unscales and skips by itself: it reads the scale and the overflow flag from attributes.

    They are removed afterwards. If the step raises, a scale that the user had set is restored, for another try.
    """
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return torch.amp.GradScaler.step(scaler, optimizer, *args, **kwargs)
    if state["stage"] is OptState.READY:
        scaler._check_inf_per_device(optimizer)
    scale = scaler._get_scale_async()
    assert scale is not None
    preset = getattr(optimizer, "grad_scale", None)
    found_inf = any_set(flag.to(scale.device, non_blocking=True) for flag in state["found_inf_per_device"].values())
    if state["stage"] is OptState.UNSCALED:
        optimizer.grad_scale = preset
    else:
        optimizer.grad_scale = scale * (1 if preset is None else preset)
    optimizer.found_inf = torch.zeros_like(scale) if found_inf is None else found_inf
    try:
        result = optimizer.step(*args, **kwargs)
    except BaseException:
        del optimizer.grad_scale
        if preset is not None:
            optimizer.grad_scale = preset
        raise
    else:
        del optimizer.grad_scale
        return result
    finally:
        del optimizer.found_inf
