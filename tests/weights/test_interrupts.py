"""Interrupted or failed at any line, the bookkeeping of copies never leaves an old one that counts as fresh."""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn as nn

from ampcompile import weights
from ampcompile.torch_private import patches
from ampcompile.weights import Binding, free_copies, invalidate, writable_copies
from ampcompile.weights.store import store
from tests.weights.bindings import bind
from tests.weights.writers import unsampled, unseen

BF16 = torch.bfloat16
OURS = (str(Path(weights.__file__).parent) + os.sep, patches.__file__)


def swallowed(frame: FrameType | None) -> bool:
    """Whether Python swallows what is raised in a frame: it was called where an object was freed."""
    callbacks = ("__del__", "_storage_freed", "drop")
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        if frame.f_code.co_name in callbacks:
            return True
        frame = frame.f_back
    return False


def interrupted(at: int, act: Callable[[], object]) -> bool:
    """Run `act` with a KeyboardInterrupt before line `at` that it reaches in our files; whether it got that far."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(OURS) or swallowed(frame):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    before, torch_function = sys.gettrace(), torch._C._get_torch_function_state()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # `no_grad` itself doesn't survive every interrupt
        torch._C._set_torch_function_state(torch_function)  # nor does what disables it
        while store.lock._is_owned():  # tracing interrupts between a `with` block and its exit, where no signal does
            store.lock.release()
    return lines >= at


class Case:
    """Two weights, the first shared with a flat buffer and an alias; two graphs."""

    def __init__(self, called: bool = True) -> None:
        self.flat = torch.randn(800)
        self.weights = [nn.Parameter(self.flat[:400].view(20, 20)), nn.Parameter(torch.randn(20, 20))]
        self.alias = nn.Parameter(self.weights[1].data)
        self.bindings: list[Binding] = [bind([BF16] * 2), bind([BF16])]
        if called:
            self.call()
            self.call()

    def call(self) -> None:
        self.bindings[0].copies(self.weights)
        self.bindings[1].copies(self.weights[1:])

    def check(self) -> None:
        for _ in range(2):
            for binding, read in zip(self.bindings, (self.weights, self.weights[1:]), strict=True):
                for copy, weight in zip(binding.copies(read), read, strict=True):
                    assert torch.equal(copy, weight.detach().to(BF16)), "stale"

    def one(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight[unsampled(weight)] += 1


def fused_step(case: Case) -> None:
    """What our fused optimizer step does."""
    lent = writable_copies(case.weights)
    for i, param in enumerate(case.weights):
        copies = lent.buffers[i].values()
        unseen(param)[unsampled(param)] += 1
        for copy in copies:
            torch.from_dlpack(copy).copy_(param.detach())
        torch.autograd.graph.increment_version([param, *copies])
    lent.mark_written()


def optimizer_step(case: Case) -> None:
    for param in case.weights:
        param.grad = torch.zeros_like(param)
        param.grad[unsampled(param)] = 1.0
    torch.optim.SGD(case.weights, lr=1.0, fused=True).step()


def written_unseen(case: Case) -> None:
    unseen(case.weights[1])[unsampled(case.weights[1])] += 1
    invalidate(case.weights)


ACTS: dict[str, Callable[[Case], object]] = {
    "in place": lambda case: case.one(case.weights[0]),
    "the flat buffer": lambda case: case.one(case.flat),
    "an alias": lambda case: case.one(case.alias),
    ".data": lambda case: case.one(case.weights[1].data),
    "a fused step with copies": fused_step,
    "the third fused step with copies": lambda case: [(fused_step(case), case.call()) for _ in range(3)],
    "a fused optimizer": optimizer_step,
    "announced": written_unseen,
    "numpy": lambda case: case.weights[1].detach().numpy().__setitem__(unsampled(case.weights[1]), 7.0),
    "dlpack": lambda case: torch.from_dlpack(case.weights[0].detach()).add_(1),
    "copies freed": lambda case: free_copies(case.weights),
    "new data": lambda case: setattr(case.weights[1], "data", torch.randn(20, 20)),
    "swap_tensors": lambda case: torch.utils.swap_tensors(case.weights[1], nn.Parameter(torch.randn(20, 20))),
    "a storage": lambda case: case.weights[0].untyped_storage().fill_(60),
}


def interrupted_refresh(act: str, at: int) -> bool:
    """A write, then a call that is interrupted; another write."""
    case = Case()
    ACTS[act](case)
    reached = interrupted(at, case.call)
    case.check()
    case.one(case.alias)
    case.check()
    return reached


def interrupted_report(act: str, at: int) -> bool:
    """A write whose report is interrupted; the same again."""
    case = Case()
    reached = interrupted(at, lambda: ACTS[act](case))
    if act == "announced":
        invalidate(case.weights)  # whoever is interrupted in it has to say it again
    case.check()
    with contextlib.suppress(RuntimeError):
        ACTS[act](case)
    case.check()
    return reached


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("trial", [interrupted_refresh, interrupted_report])
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_at_any_line(act: str, trial: Callable[[str, int], bool], stride: int) -> None:
    at = random.randint(1, stride)
    while trial(act, at):
        at += stride
    assert at > 20 or trial is interrupted_report


def test_an_interrupt_of_the_first_call() -> None:
    at, reached = random.randint(1, 2), True
    while reached:
        case = Case(called=False)
        reached = interrupted(at, case.call)
        case.check()
        for act in (".data", "a storage", "a fused optimizer", "swap_tensors"):
            ACTS[act](case)
            case.check()
        del case
        at += 2
    assert at > 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # swallowed where objects are freed
def test_signals_at_any_time() -> None:
    """As Ctrl-C comes: wherever the interpreter looks for signals."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    case, interrupts = Case(), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            act = random.choice(list(ACTS))
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3))
                    for _ in range(5):
                        ACTS[act](case)
                        case.call()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    torch.set_grad_enabled(True)  # `no_grad` itself doesn't survive every interrupt
            except (KeyboardInterrupt, RuntimeError):  # swap_tensors refuses tensors that a broken-off call still holds
                interrupts += 1
            assert not store.lock._is_owned()
            invalidate(case.weights)  # an act that was broken off reported nothing
            case.check()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 50


def test_a_cast_that_fails_leaves_nothing_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.weights.append(nn.Parameter(torch.randn(20, 20, dtype=torch.float64)))  # whose casts are torch's
    case.bindings = [bind([BF16] * 3), bind([BF16] * 2)]
    case.call()
    for weight in case.weights:
        case.one(weight)
    with monkeypatch.context() as patch:
        patch.setattr("ampcompile.weights.copies.cast_many_", lambda *_: (_ for _ in ()).throw(MemoryError()))
        for _ in range(2):
            with pytest.raises(MemoryError):
                case.call()
    case.check()
