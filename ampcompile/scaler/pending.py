"""Pending factors: a fused `clip_grad_norm_` leaves it to the step to multiply the clipped gradients by them.

The step applies them, or they are dropped with the gradients, or ClipError is raised: other gradients never get them.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ClipError
from ampcompile.kernels.planned import Marks, PlannedTensors
from ampcompile.torch_private import dynamo_marks, foreach, optimizers

PerDevice = dict[torch.device, Tensor]
NAME = "ampcompile: clipping"


Gradients = Sequence[Tensor] | PlannedTensors


class Pending:
    """Pending factors as a hook ahead of the optimizer's own step, which is clipped too; the optimizer holds it."""

    def __init__(self, factors: PerDevice, grads: Gradients) -> None:
        self.take(factors, grads)

    def take(self, factors: PerDevice, grads: Gradients) -> None:
        """Replace the factors, and the marks of the clipped gradients by those of `grads`; `over` is True once their
        iteration has ended: then changed gradients drop the factors and don't raise.
        """
        marks = Marks(grads)
        # No signal handler runs between stores: the state is wholly the former or wholly this.
        self.factors, self.marks, self.over, self.done = factors, marks, False, False

    def drop_call(self) -> Callable[[], object]:
        """Return a C function that removes the factors, which has the effect of `drop`."""
        return partial(setattr, self, "factors", {})

    @dynamo_marks.run_untraced
    def __call__(self, optimizer: Any, *_: Any) -> None:
        leave_to_torch(optimizer)


def pending(optimizer: Any) -> Pending | None:
    """Return an optimizer's hook with pending factors, if it has one."""
    hook = optimizers.named_pre_hooks(optimizer).get(NAME)
    return None if hook is None or hook.done else hook


def set_pending(optimizer: Any, factors: PerDevice, grads: Gradients) -> None:
    """Make the next step multiply the gradients, which are `grads`, by these factors; they replace pending ones."""
    hooks = optimizers.named_pre_hooks(optimizer)
    if (hook := hooks.get(NAME)) is None:
        hooks[NAME] = Pending(factors, grads)
    else:
        hook.take(factors, grads)


def drop(optimizer: Any) -> None:
    """Drop an optimizer's pending factors."""
    hooks = optimizers.named_pre_hooks(optimizer)
    if (hook := hooks.get(NAME)) is not None:
        hook.done = True
        if next(reversed(hooks)) == NAME:  # else torch may be calling them, in turn
            del hooks[NAME]


def factors(optimizer: Any, grads: Gradients) -> PerDevice:
    """Return the factors for a step's gradients, `grads`; raise ClipError if others were clipped in this iteration."""
    if (hook := pending(optimizer)) is None:
        return {}
    if hook.marks.match(grads):
        return hook.factors
    if hook.factors and not hook.over:
        raise ClipError(
            "found gradients that were written or replaced since clip_grad_norm_(), expected those that it measured: "
            "its clipping is part of the step. Call update() at the end of every iteration, also of one without a "
            "step; to change gradients after clipping, use unscale_() and torch.nn.utils.clip_grad_norm_()"
        )
    drop(optimizer)
    return {}


def apply_pending(optimizer: Any) -> None:
    """Multiply the gradients in place by the pending factors: the step won't be a fused one."""
    grads = gradients(optimizer)
    clipped = factors(optimizer, grads)
    if (hook := pending(optimizer)) is None:
        return
    calls: list[Callable[[], object]] = [
        partial(foreach.multiply_, [grad for grad in grads if grad.device == device], factor)
        for device, factor in clipped.items()
    ]
    with torch.no_grad():
        call_unbroken([*calls, hook.marks.renewal(grads), hook.drop_call()])
    drop(optimizer)


def leave_to_torch(optimizer: Any) -> None:
    """Apply pending factors, unless the optimizer keeps masters: its step clips, and rounds no gradient for it."""
    if not hasattr(optimizer.step, "keeps_masters"):
        apply_pending(optimizer)


def call_unbroken(calls: Iterable[Callable[[], object]]) -> None:
    """Call C functions in turn. No signal handler runs in between: Python runs them between bytecodes only."""
    deque(map(operator.call, calls), maxlen=0)


def gradients(optimizer: Any) -> list[Tensor]:
    """All gradients of an optimizer."""
    return [grad for param in parameters(optimizer) if (grad := param.grad) is not None]


def parameters(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
