"""Errors of the user's own code: in a forward, between its pieces, in a backward, in an optimizer's hook."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proof.faults.subject import Model, Subject, batch, nothing_left


class UserError(Exception):
    """The user's own."""


class Fuse:
    """Blows once, when it is armed."""

    armed = False

    def check(self) -> None:
        """Raise UserError if armed."""
        if self.armed:
            self.armed = False
            raise UserError


class Bomb(torch.autograd.Function):
    """Its input, as it is; its backward may raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        """The same numbers."""
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        ctx.fuse.check()
        return grad, None


class Breaking:
    """A call between two graphs of a model that may raise, in forward or in backward."""

    fuses: tuple[Fuse, Fuse]

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        """Run as it is."""
        self.fuses[0].check()
        return Bomb.apply(x, self.fuses[1])


class Fragile(Breaking, Model):
    """A model in two graphs."""

    def __init__(self, *fuses: Fuse) -> None:
        super().__init__()
        self.fuses = fuses[0], fuses[1]

    def forward(self, x: Tensor) -> Tensor:
        """[N, SIZE] to [N, 4]."""
        return super().forward(self.between(self.first(x)))


def survived(act: Callable[[Subject, Fuse, Fuse], object]) -> int:
    """Three times: train, have `act` raise, go on."""
    forward, backward = Fuse(), Fuse()
    subject = Subject(Fragile(forward, backward))
    for _ in range(3):
        subject.train()
        try:
            act(subject, forward, backward)
        except UserError:
            pass
        else:
            raise AssertionError("nothing was raised")
        subject.check()
        subject.check_step()
    del subject
    nothing_left()
    return 3


def in_forward(subject: Subject, forward: Fuse, _: Fuse) -> None:
    """The model raises between two graphs of its forward."""
    forward.armed = True
    subject.backward(batch())


def in_backward(subject: Subject, _: Fuse, backward: Fuse) -> None:
    """A custom function raises in the middle of backward."""
    backward.armed = True
    subject.backward(batch())


def in_a_gradient_hook(subject: Subject, forward: Fuse, _: Fuse) -> None:
    """A hook on a weight's gradient raises, when some gradients are there."""
    handle = subject.model.second.weight.register_hook(lambda _: forward.check())
    try:
        loss = subject.loss(subject.run, batch())
        forward.armed = True
        subject.scaler.scale(loss).backward()
    finally:
        handle.remove()


def after_a_write(subject: Subject, forward: Fuse, _: Fuse) -> None:
    """The optimizer's own hook raises after it wrote the weights."""
    handle = subject.optimizer.register_step_post_hook(lambda *_: forward.check())
    try:
        subject.backward(batch())
        forward.armed = True
        subject.update()
    finally:
        handle.remove()
        subject.scaler.update()


FAULTS = {
    (act.__doc__ or "").rstrip("."): partial(survived, act)
    for act in (in_forward, in_backward, in_a_gradient_hook, after_a_write)
}
