"""Clipping, of one iteration: in place, or by factors by which the step multiplies the gradients.

The factors wait with the optimizer. Its step applies them, or they are dropped with the gradients, or ClipError is
raised: other gradients never get them.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampcompile.errors import ClipError, ScalerError
from ampcompile.kernels.planned import Marks
from ampcompile.torch_private import dynamo_marks, optimizers

from .families import gradients
from .plan import Gradients, PerDevice, Plan

NAME = "ampcompile: clipping"


class Pending:
    """Factors that wait for the step, none once they are dropped. It is a hook ahead of the optimizer's own step, which
    is clipped too.
    """

    def __init__(self, factors: PerDevice, grads: Gradients) -> None:
        self.take(factors, grads)

    def take(self, factors: PerDevice, grads: Gradients) -> None:
        """Replace the factors, and the marks of the clipped gradients by those of `grads`; `over` is True once their
        iteration has ended: then changed gradients drop the factors and don't raise. `by_optimizer`: its own method
        clipped, which takes gradients for unscaled ones.
        """
        marks = Marks(grads)
        # No signal handler runs between stores: the state is wholly the former or wholly this.
        self.factors, self.marks, self.over, self.by_optimizer = factors, marks, False, False

    def drop_call(self) -> Callable[[], object]:
        """Return a C function that drops the factors."""
        return partial(setattr, self, "factors", {})

    @dynamo_marks.run_untraced
    def __call__(self, optimizer: Any, *_: Any) -> None:
        if not getattr(own_step(optimizer), "running", False):
            apply_pending(optimizer)


def pending(optimizer: Any) -> Pending | None:
    """Return what holds an optimizer's pending factors, if there are some."""
    hook = optimizers.named_pre_hooks(optimizer).get(NAME)
    return hook if hook is not None and hook.factors else None


def set_pending(optimizer: Any, factors: PerDevice, grads: Gradients) -> None:
    """Make the next step multiply the gradients, which are `grads`, by these factors; they replace pending ones."""
    hooks = optimizers.named_pre_hooks(optimizer)
    if NAME in hooks:
        hooks[NAME].take(factors, grads)
    else:
        hooks[NAME] = Pending(factors, grads)


def drop(optimizer: Any) -> None:
    """Drop an optimizer's pending factors."""
    if (hook := pending(optimizer)) is not None:
        hook.factors = {}


def factors(optimizer: Any, grads: Gradients) -> PerDevice:
    """Return the factors for a step's gradients, `grads`; raise ClipError if others were clipped in this iteration."""
    if (hook := pending(optimizer)) is None:
        return {}
    if not hook.marks.match(grads):
        if not hook.over:
            raise ClipError(
                "found gradients that were written or replaced since clip_grad_norm_(), expected those that it "
                "measured: its clipping is part of the step. Call update() at the end of every iteration, also of one "
                "without a step; to change gradients after clipping, use unscale_(), if a scaler scales, and "
                "torch.nn.utils.clip_grad_norm_()"
            )
        hook.factors = {}
    return hook.factors


def apply_pending(optimizer: Any) -> None:
    """Multiply the gradients in place by the pending factors: the step won't be a fused one."""
    if clipped := factors(optimizer, gradients(optimizer)):
        multiply(optimizer, clipped)


def multiply(optimizer: Any, multipliers: PerDevice) -> None:
    """Multiply the gradients in place by these multipliers, pending factors among them, which are dropped."""
    grads, hook = gradients(optimizer), pending(optimizer)
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    calls: list[Callable[[], object]] = [
        partial(optimizers.multiply_, [value for value in values if value.device == device], multiplier)
        for device, multiplier in multipliers.items()
    ]
    if hook is not None:
        calls += [hook.marks.renewal(grads), hook.drop_call()]
    with torch.no_grad():
        call_unbroken(calls)


def own_step(optimizer: Any) -> Any:
    """Return an optimizer's step of ours, if it is of our classes or keeps masters."""
    return getattr(optimizer, "_ampcompile_step", None)


def leave_to_torch(optimizer: Any) -> None:
    """Apply pending factors, unless the optimizer's step is ours: it clips, and rounds no gradient for it."""
    if own_step(optimizer) is None or optimizers.foreign_step(optimizer) is not None:
        apply_pending(optimizer)


def require_unscaled_clipping(optimizer: Any) -> None:
    """Raise where gradients are to be unscaled that the optimizer's own clipping has measured; drop that, and what a
    scaler has set on the optimizer, which the next, right step would read.
    """
    if (hook := pending(optimizer)) is None or not hook.by_optimizer or hook.over:
        return
    hook.factors = {}
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    raise ClipError(
        "found a scaler that unscales gradients after clip_grad_norm_() of their optimizer, expected them unscaled "
        "before: its norm is that of scaled gradients. Call scaler.unscale_(optimizer) first, or clip by "
        "clip_grad_norm_(optimizer, max_norm) of ampcompile.GradScaler"
    )


def call_unbroken(calls: Iterable[Callable[[], object]]) -> None:
    """Call C functions in turn. No signal handler runs in between: Python runs them between bytecodes only."""
    deque(map(operator.call, calls), maxlen=0)


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
            hook.factors = {}
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
            state["stage"] = OptState.UNSCALED
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
