"""Ctrl-C and failed allocations wherever they may come: in a call that casts weights, in a step, while compiling."""

import contextlib
import random
from collections.abc import Callable, Mapping
from functools import partial

import torch

from proof.faults.injecting import places, raised_at
from proof.faults.subject import Subject, batch, nothing_left

Act = Callable[[Subject], Callable[[], object]]
"""Prepares a subject, and returns what is broken off."""
COMPILING = 50
"""Places in compiling that are tried."""


def refresh(subject: Subject) -> Callable[[], object]:
    """A call that has weights to cast again: one was written in place, one through `.data`."""
    with torch.no_grad():
        subject.model.first.weight += 0.5
        subject.model.second.weight.data[3, 5] += 1
    data = batch()
    return lambda: subject.loss(subject.run, data).backward()


def step(subject: Subject) -> Callable[[], object]:
    """Run the part of a step that follows backward."""
    subject.backward(batch())
    return subject.update


def broken_off(act: Act, error: type[BaseException], stride: int = 1) -> int:
    """`act` broken off at every place, or every so many; how often."""
    subject = Subject()
    subject.train(2)
    subject.check()
    trials, at, reached = 0, 1, True
    while reached:
        reached = raised_at(at, error, act(subject))
        try:
            _go_on(subject)
        except Exception as wrong:
            raise AssertionError(f"at place {at}: {wrong}") from wrong
        trials, at = trials + reached, at + stride
    del subject
    nothing_left()
    return trials


def _go_on(subject: Subject) -> None:
    """As a loop does that goes on to its next iteration."""
    subject.check()
    with contextlib.suppress(AssertionError):  # of torch's scaler, where the step didn't come to its check
        subject.scaler.update()
    subject.check_step()


def while_compiling(error: type[BaseException], trials: int = COMPILING) -> int:
    """Broken off at places drawn from all that compiling a model and its backward passes."""

    def first_call(subject: Subject) -> Callable[[], object]:
        data = batch()
        return lambda: subject.loss(subject.run, data).backward()

    passed = places(error, first_call(Subject()))
    for at in sorted(random.Random(0).sample(range(1, passed), trials)):
        torch._dynamo.reset()
        subject = Subject()
        with contextlib.suppress(Exception):  # what torch makes of an error in the middle of it
            raised_at(at, error, first_call(subject))
        try:
            _go_on(subject)
        except Exception as wrong:
            raise AssertionError(f"at place {at} of {passed}: {wrong}") from wrong
        del subject
    nothing_left()
    return trials


ERRORS: dict[str, type[BaseException]] = {"Ctrl-C": KeyboardInterrupt, "Out of memory": torch.OutOfMemoryError}
ACTS: dict[str, Act] = {"a call that casts weights": refresh, "clipping, step and update": step}
FAULTS: Mapping[str, Callable[[], int]] = {
    f"{name} anywhere in {where}": partial(broken_off, act, error)
    for where, act in ACTS.items()
    for name, error in ERRORS.items()
} | {f"{name} at {COMPILING} places in compiling": partial(while_compiling, error) for name, error in ERRORS.items()}
