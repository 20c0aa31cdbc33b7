"""`GradScaler.clip_grad_norm_` and `clip_grad_value_`: clipping, of one iteration, in the step or in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampcompile.errors import ClipError, ScalerError
from ampcompile.kernels.planned import Marks

from .pending import drop, factors, gradients, pending, set_pending
from .plan import Plan


def require_optimizer(name: str, argument: Any) -> None:
    """Raise if the first argument of the scaler's method `name` is parameters, as torch's clipping takes."""
    if not hasattr(argument, "param_groups"):
        second = {"clip_grad_norm_": ", max_norm", "clip_grad_value_": ", clip_value"}.get(name, "")
        raise ScalerError(
            f"found {type(argument).__name__!r} as the first argument of {name}(), expected the optimizer of these "
            f"gradients: write scaler.{name}(optimizer{second})"
        )


def require_one_iteration(name: str, optimizer: Any, state: dict[str, Any] | None) -> None:
    """Raise where torch's `unscale_` would: after the step, and for gradients of another iteration.

    `name`: the method that is called. `state`: the scaler's for this optimizer; None if it doesn't scale: then factors
    of other gradients are dropped.
    """
    if state is None:
        if (hook := pending(optimizer)) is not None and (hook.over or not hook.marks.match(gradients(optimizer))):
            drop(optimizer)
    elif state["stage"] is OptState.STEPPED:
        raise RuntimeError(f"{name}() is being called after step().")
    elif "clipped" in state and not state["clipped"].match(gradients(optimizer)):
        raise ClipError(
            f"found new gradients at a second clipping of this optimizer's, by {name}(), since the last update(), "
            "expected those of one iteration: call update() also where you leave out step()"
        )


def note_clipped(optimizer: Any, state: dict[str, Any] | None, ready: bool) -> None:
    """Record which gradients were clipped, for `require_one_iteration`; `ready`: they hadn't been unscaled before."""
    if state is not None and (ready or "clipped" in state) and state["stage"] is OptState.UNSCALED:
        hook = pending(optimizer)
        state["clipped"] = Marks(gradients(optimizer)) if hook is None else hook.marks


def clip_in_step(
    optimizer: Any,
    plan: Plan,
    scale: Tensor | None,
    state: dict[str, Any] | None,
    max_norm: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Defer the clipping, and the unscaling if there is a scale, to the step; return the norm.

    `state`: the scaler's for an optimizer that isn't unscaled yet, if it scales.
    """
    if not plan.work:
        if state is not None:
            state.update(stage=OptState.UNSCALED)
        return torch.zeros(())
    before = factors(optimizer, plan.gradients)
    found_infs, clipping, norm = plan.check(scale, before, max_norm)
    failed = error_if_nonfinite and not norm.isfinite()
    if failed:
        clipping = plan.check(scale, before)[1]
    try:
        set_pending(optimizer, clipping, plan.gradients)
        if state is not None:
            state.update(stage=OptState.UNSCALED, found_inf_per_device=found_infs)
    except BaseException:
        if state is not None and state["stage"] is OptState.READY:  # the step unscales by itself
            drop(optimizer)
        raise
    if failed:
        raise RuntimeError(
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm


def clip_values(params: list[Tensor], clip_value: float, foreach: bool | None) -> None:
    """Clip each element of the gradients by torch's function; on a CPU in one pass, where its default takes two."""
    one_pass = foreach is None and all(param.is_cpu for param in params)
    nn.utils.clip_grad_value_(params, clip_value, False if one_pass else foreach)
