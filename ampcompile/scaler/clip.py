"""`GradScaler.clip_grad_norm_`: clipping, once per iteration, in the step or in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampcompile.errors import ClipError, ScalerError

from .fused import FusedStep
from .pending import GradientMarks, drop, factors, gradients, pending, set_pending


def require_optimizer(argument: Any) -> None:
    """Raise if the argument is parameters, which torch's own function takes."""
    if not hasattr(argument, "param_groups"):
        raise ScalerError(
            f"found {type(argument).__name__!r} as the first argument of clip_grad_norm_(), expected an optimizer, in "
            "whose step the gradients are clipped: write scaler.clip_grad_norm_(optimizer, max_norm)"
        )


def require_one_iteration(optimizer: Any, state: dict[str, Any] | None) -> None:
    """Raise where torch's `unscale_` would: after the step, and for gradients of another iteration.

    `state`: the scaler's for this optimizer; None if it doesn't scale: then factors of other gradients are dropped.
    """
    if state is None:
        if (hook := pending(optimizer)) is not None and (hook.over or not hook.gradients.match(gradients(optimizer))):
            hook.drop()
    elif state["stage"] is OptState.STEPPED:
        raise RuntimeError("clip_grad_norm_() is being called after step().")
    elif "clipped" in state and not state["clipped"].match(gradients(optimizer)):
        raise ClipError(
            "found new gradients at a second clip_grad_norm_() on this optimizer since the last update(), expected one "
            "clip_grad_norm_() for each iteration: call update() also where you leave out step()"
        )


def note_clipped(optimizer: Any, state: dict[str, Any] | None, ready: bool) -> None:
    """Record which gradients were clipped, for `require_one_iteration`; `ready`: they hadn't been unscaled before."""
    if state is not None and (ready or "clipped" in state) and state["stage"] is OptState.UNSCALED:
        hook = pending(optimizer)
        state["clipped"] = GradientMarks(gradients(optimizer)) if hook is None else hook.gradients


def clip_in_step(
    fused: FusedStep, scale: Tensor | None, state: dict[str, Any] | None, max_norm: float, error_if_nonfinite: bool
) -> Tensor:
    """Defer the clipping, and the unscaling if there is a scale, to the step; return the norm.

    `state`: the scaler's for an optimizer that isn't unscaled yet, if it scales.
    """
    if not fused.work:
        if state is not None:
            state.update(stage=OptState.UNSCALED)
        return torch.zeros(())
    before = factors(fused.optimizer, fused.grads)
    found_infs, clipping, norm = fused.check(scale, before, max_norm)
    failed = error_if_nonfinite and not norm.isfinite()
    if failed:
        clipping = fused.check(scale, before)[1]
    try:
        set_pending(fused.optimizer, clipping, fused.grads)
        if state is not None:
            state.update(stage=OptState.UNSCALED, found_inf_per_device=found_infs)
    except BaseException:
        if state is not None and state["stage"] is OptState.READY:  # the step unscales by itself
            drop(fused.optimizer)
        raise
    if failed:
        raise RuntimeError(
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm
