"""Interrupted or failed at any line, the bookkeeping of copies never leaves an old one that counts as fresh."""

import contextlib
import random
import signal
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from ampcompile.weights import free_copies, invalidate
from ampcompile.weights.store import store
from tests.injecting import raised_at
from tests.weights.bindings import bind, take_step
from tests.weights.writers import ONE_PLACE, unsampled, unseen

BF16 = torch.bfloat16


class Case:
    """Two weights, the first shared with a flat buffer and an alias; two graphs."""

    def __init__(self, called: bool = True) -> None:
        self.flat = torch.randn(800)
        self.weights = [nn.Parameter(self.flat[:400].view(20, 20)), nn.Parameter(torch.randn(20, 20))]
        self.alias = nn.Parameter(self.weights[1].data)
        self.bindings = [bind([BF16] * 2), bind([BF16])]
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


def fused_step(case: Case) -> None:
    def write() -> None:
        for param in case.weights:
            unseen(param)[unsampled(param)] += 1

    take_step(case.weights, write)


def write(tensor: torch.Tensor, how: str) -> None:
    """By one of the writers that all tests share."""
    ONE_PLACE[how](tensor, unsampled(tensor))


ACTS: dict[str, Callable[[Case], object]] = {
    "in place": lambda case: write(case.weights[0], "in place"),
    "the flat buffer": lambda case: write(case.flat, "in place"),
    "an alias": lambda case: write(case.alias, "in place"),
    ".data": lambda case: write(case.weights[1], ".data"),
    "a fused step with copies": fused_step,
    "the third fused step with copies": lambda case: [(fused_step(case), case.call()) for _ in range(3)],
    "a fused optimizer": lambda case: [write(weight, "a fused optimizer") for weight in case.weights],
    "announced": lambda case: write(case.weights[1], "a raw pointer, announced"),
    "numpy": lambda case: write(case.weights[1], "numpy"),
    "dlpack": lambda case: write(case.weights[0], "dlpack"),
    "copies freed": lambda case: free_copies(case.weights),
    "new data": lambda case: write(case.weights[1], "data = new"),
    "swap_tensors": lambda case: write(case.weights[1], "swap_tensors"),
    "a storage": lambda case: write(case.weights[0], "a byte of the storage"),
}
# What leaves the table in another state than all others, for the call after it.
LEAVE_A_STATE = (
    "in place",
    "an alias",
    ".data",
    "a fused step with copies",
    "copies freed",
    "new data",
    "swap_tensors",
)
errors = pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])


@errors
@pytest.mark.parametrize("act", LEAVE_A_STATE)
def test_an_interrupt_of_the_call_after_a_write(act: str, error: type[BaseException]) -> None:
    """Then another write."""
    at, reached = 0, True
    while reached:
        at, case = at + 1, Case()
        ACTS[act](case)
        reached = raised_at(at, error, case.call)
        case.check()
        write(case.alias, "in place")
        case.check()
    assert at > (5 if error is KeyboardInterrupt else 2)


@errors
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_of_a_report(act: str, error: type[BaseException]) -> None:
    """Then the same again."""
    at, reached = 0, True
    while reached:
        at, case = at + 1, Case()
        reached = raised_at(at, error, lambda case=case: ACTS[act](case))
        if act == "announced":
            invalidate(case.weights)  # whoever is interrupted in it has to say it again
        case.check()
        with contextlib.suppress(RuntimeError):
            ACTS[act](case)
        case.check()


@errors
def test_an_interrupt_of_the_first_call(error: type[BaseException]) -> None:
    at, reached = 0, True
    while reached:
        at, case = at + 1, Case(called=False)
        reached = raised_at(at, error, case.call)
        case.check()
        for act in (".data", "a storage", "a fused optimizer", "swap_tensors"):
            ACTS[act](case)
            case.check()
        del case
    assert at > 50


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
        write(weight, "in place")
    with monkeypatch.context() as patch:
        patch.setattr("ampcompile.weights.copies.cast_many_", lambda *_: (_ for _ in ()).throw(MemoryError()))
        for _ in range(2):
            with pytest.raises(MemoryError):
                case.call()
    case.check()
