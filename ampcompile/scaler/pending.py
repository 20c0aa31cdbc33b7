"""What a fused `clip_grad_norm_` leaves for the step: factors that belong to these gradients of this optimizer.

They are applied by the step, dropped with the gradients, or refused aloud; never applied to other gradients.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.errors import ClipError
from ampcompile.torch_private import dynamo_marks, foreach, optimizers

PerDevice = dict[torch.device, Tensor]


class Gradients(NamedTuple):
    """All gradients of an optimizer."""

    tensors: Sequence[Tensor]
    addresses: list[int] | None = None
    """Where they lie, if that was read just now."""


class Noted:
    """Gradients as they are now, recognized later without being kept alive."""

    def __init__(self, grads: Gradients) -> None:
        self.marks = optimizers.Marks(*grads)

    def still(self, grads: Gradients) -> bool:
        """Whether `grads`, all that there are now, are these and weren't written; some may be gone."""
        return self.marks.still(*grads)


class Pending:
    """A hook ahead of the optimizer's own step, so that this one is clipped too; the optimizer holds it."""

    def __init__(self, optimizer: Any, factors: PerDevice, grads: Gradients) -> None:
        self.take(factors, grads)
        self._hook = optimizer.register_step_pre_hook(self)

    def take(self, factors: PerDevice, grads: Gradients) -> None:
        """Hold these from now on: `gradients` are those that were clipped; `over`, whether their iteration has ended,
        so that those which changed since aren't meant any more.
        """
        clipped = Noted(grads)
        # No signal comes between stores: what is pending is wholly the former or wholly this.
        self.factors, self.gradients, self.over = factors, clipped, False

    def dropping(self) -> Callable[[], object]:
        """A function of C that leaves no factors, which is as good as `drop`."""
        return partial(setattr, self, "factors", {})

    def drop(self) -> None:
        """Forget the factors."""
        self._hook.remove()

    @dynamo_marks.run_untraced
    def __call__(self, optimizer: Any, *_: Any) -> None:
        apply_pending(optimizer)


def pending(optimizer: Any) -> Pending | None:
    """What is pending for an optimizer."""
    return next((hook for hook in optimizers.pre_hooks(optimizer) if isinstance(hook, Pending)), None)


def leave(optimizer: Any, factors: PerDevice, grads: Gradients) -> None:
    """Have the next step multiply the gradients, which are `grads`, by these factors, instead of what was pending."""
    if (left := pending(optimizer)) is None:
        Pending(optimizer, factors, grads)
    else:
        left.take(factors, grads)


def drop(optimizer: Any) -> None:
    """Forget what is pending."""
    if (left := pending(optimizer)) is not None:
        left.drop()


def factors(optimizer: Any, grads: Gradients) -> PerDevice:
    """What a step has to multiply the gradients, `grads`, by; an error if they aren't those that were clipped."""
    if (left := pending(optimizer)) is None:
        return {}
    if left.gradients.still(grads):
        return left.factors
    if left.factors and not left.over:
        raise ClipError(
            "found gradients that were written or replaced since clip_grad_norm_(), expected those that it measured: "
            "its clipping is part of the step. Call update() at the end of every iteration, also of one without a "
            "step; to change gradients after clipping, use unscale_() and torch.nn.utils.clip_grad_norm_()"
        )
    left.drop()
    return {}


def apply_pending(optimizer: Any) -> None:
    """Multiply the gradients themselves by what is pending: the step won't be a fused one."""
    grads = gradients(optimizer)
    clipped = factors(optimizer, grads)
    if (left := pending(optimizer)) is None:
        return
    marks = optimizers.Marks(*grads)
    acts: list[Callable[[], object]] = []
    for device, factor in clipped.items():
        acts.append(partial(foreach.multiply_, [grad for grad in grads.tensors if grad.device == device], factor))
    acts += (
        marks.reading_versions(grads.tensors),
        partial(setattr, left.gradients, "marks", marks),
        left.dropping(),
    )
    with torch.no_grad():
        call_unbroken(acts)
    left.drop()


def call_unbroken(acts: Iterable[Callable[[], object]]) -> None:
    """Call functions of C in turn. No signal comes between: Python handles them between steps of its own only."""
    deque(map(operator.call, acts), maxlen=0)


def gradients(optimizer: Any) -> Gradients:
    """All gradients of an optimizer."""
    return Gradients([grad for param in parameters(optimizer) if (grad := param.grad) is not None])


def parameters(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
