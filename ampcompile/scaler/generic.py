"""What `torch.amp.GradScaler` does, for any optimizer: unscale and clip gradients in place, take a step that waits."""

import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampcompile.kernels.unscale import unscale_
from ampcompile.optim.fused_step import step_of
from ampcompile.optim.plan import (
    GRAD_DTYPES,
    NotFusedError,
    amp_aware,
    any_set,
    gradients,
    on_device,
    parameters,
    require_tensors,
)
from ampcompile.torch_private import dispatcher, optimizers


def unscale_grads(
    optimizer: Any,
    multiplier: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
    workspaces: dict[torch.device, dict[str, Any]],
) -> dict[torch.device, Tensor]:
    """Multiply all gradients in place, by our kernel where it can, else by torch's; return an overflow flag per device
    that has some, copied from `found_inf`.

    Checks all gradients before it changes one. A gradient overflows if it is infinite or NaN before or after.
    """
    kinds: dict[tuple[torch.device, torch.dtype, type], list[Tensor]] = defaultdict(list)
    for param in parameters(optimizer):
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
            try:
                if dispatcher.acting_mode() is not None or not are_plain(multiplier, found_inf):
                    raise NotFusedError
                require_tensors("gradient", grads, GRAD_DTYPES)
            except NotFusedError:
                unscale_by_torch(grads, factors[device], flags[device])
            else:
                unscale_(grads, factors[device], flags[device], workspaces.setdefault(device, {}))
    return flags


def are_plain(*scalars: Tensor | None) -> bool:
    """Return True if a scale and flags have memory: those that were made under `FakeTensorMode` have none."""
    return all(scalar is None or type(scalar) is Tensor for scalar in scalars)


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


def unscale_by_torch(grads: list[Tensor], multiplier: Tensor, found_inf: Tensor) -> None:
    """Unscale by `torch.amp.GradScaler`'s op, which takes every layout, and for DTensors asks all ranks. It checks
    scaled gradients only, so it runs again on unscaled ones. A multiplier of 0, of an infinite scale, is an overflow.
    """
    optimizers.check_and_unscale_(grads, found_inf, multiplier)
    optimizers.check_and_unscale_(grads, found_inf, torch.ones_like(multiplier))
    found_inf.copy_(torch.where(multiplier.reshape(found_inf.shape) == 0, 1.0, found_inf))


def clip_values(params: list[Tensor], clip_value: float, foreach: bool | None) -> None:
    """Clip each element of the gradients by torch's function; on a CPU in one pass, where its default takes two."""
    one_pass = foreach is None and all(param.is_cpu for param in params)
    nn.utils.clip_grad_value_(params, clip_value, False if one_pass else foreach)


def generic_step(
    scaler: torch.amp.GradScaler, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Take torch's step, for which the host waits, unless the optimizer unscales and skips by itself.

    An optimizer of ours doesn't if it has a hook or a patch of others, as these would see scaled gradients.
    """
    step = step_of(optimizer)
    foreign = step is not None and not optimizers.is_bare(optimizer)
    if step is not None and foreign:
        step.apply_pending(optimizer, scaler.is_enabled() and state["stage"] is OptState.READY)
    if not scaler.is_enabled():
        return optimizer.step(*args, **kwargs)
    aware = amp_aware(optimizer)
    if aware and not foreign and "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return torch.amp.GradScaler.step(scaler, optimizer, *args, **kwargs)
    ready = state["stage"] is OptState.READY
    if aware and (not foreign or any(grad.dtype == torch.float16 for grad in gradients(optimizer))):
        if ready:
            scaler._check_inf_per_device(optimizer)
        scale = scaler._get_scale_async()
        assert scale is not None
        flags = [on_device(scale.device, flag) for flag in state["found_inf_per_device"].values()]
        return hand_over(optimizer, scale if ready else None, flags or [torch.zeros_like(scale)], *args, **kwargs)
    if ready:
        scaler.unscale_(optimizer)
    if not state["found_inf_per_device"]:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    return scaler._maybe_opt_step(optimizer, state, *args, **kwargs)


def hand_over(optimizer: Any, scale: Tensor | None, flags: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Take the step of an optimizer that reads scale and overflow flag from attributes, which are removed afterwards.

    Torch leaves them there if the step raises, and adds the flags of several devices; here a scale that the user had
    set is restored, for another try, and the flags are one.
    """
    preset = getattr(optimizer, "grad_scale", None)
    try:
        optimizer.grad_scale = scale if preset is None else preset if scale is None else scale * preset
        optimizer.found_inf = any_set(flags)
        result, preset = optimizer.step(*args, **kwargs), None
    finally:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):  # our classes remove them before an error
                delattr(optimizer, name)
        if preset is not None:
            optimizer.grad_scale = preset
    return result
