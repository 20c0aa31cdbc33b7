"""Lives of models and processes: forks, threads, deletion, copies, pickles, checkpoints."""

import copy
import gc
import io
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import ampcompile
from benchmarks.numbers import modes, same_bits
from proof.faults.subject import Model, Subject, batch, nothing_left

THREADS = 4


def fork() -> int:
    """The process forks after compiling; both go on training."""
    subject = Subject()
    subject.train(2)
    subject.check()
    child = os.fork()
    if child == 0:
        try:
            subject.train(2)
            subject.check()
            subject.check_step()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    subject.train(2)
    subject.check_step()
    assert os.waitpid(child, 0)[1] == 0, "the child's numbers are wrong, see what it printed"
    return 2


def _together(*acts: Callable[[], Any]) -> list[Any]:
    """Return the results of threads that begin at once; raises what one of them raises."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> Any:
        start.wait()
        return act()

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(run, acts))


def threads_compile() -> int:
    """Threads compile models of their own at once."""
    subjects = [Subject() for _ in range(THREADS)]

    def train(subject: Subject) -> None:
        subject.before = modes()  # of this thread
        subject.train(2)
        subject.check()

    _together(*(lambda subject=subject: train(subject) for subject in subjects))
    for subject in subjects:
        subject.check_step()
    return THREADS


def threads_share() -> int:
    """Threads compile and call one model at once, while its weights are written between calls."""
    subject = Subject()
    data = batch()
    for turn in range(5):
        with torch.no_grad():
            subject.model.first.weight.data[turn] += 1
        found = _together(*[lambda: subject.run(data[0]).detach()] * THREADS)
        subject.twin.load_state_dict(subject.model.state_dict())
        expected = subject.plain(data[0]).detach()
        assert all(same_bits(result, expected) for result in found), f"turn {turn}"
    subject.check_step()
    return 5 * THREADS


def deleted_before_backward() -> int:
    """A model is deleted while its graphs and a backward still live."""
    for _ in range(3):
        subject, data = Subject(), batch()
        data[0].requires_grad_()
        subject.twin.load_state_dict(subject.model.state_dict())
        (expected,) = torch.autograd.grad(subject.loss(subject.plain, data), data[0])
        loss = subject.loss(subject.run, data)
        del subject
        gc.collect()
        loss.backward()
        assert same_bits(data[0].grad, expected)
        del loss
    nothing_left()
    return 3


def deleted_in_turn() -> int:
    """Models come and go, and share compiled code."""
    for _ in range(10):
        subject = Subject()
        subject.train()
        subject.check()
        del subject
        gc.collect()
        assert ampcompile.weight_stats().copies == 0, ampcompile.weight_stats()
    nothing_left()
    return 10


def _goes_on(subject: Subject, model: torch.nn.Module) -> None:
    """A copy of a subject's model, and the subject, train apart from each other."""
    other = Subject(model)
    assert same_bits(list(subject.model.parameters()), list(other.model.parameters()))
    for each in (subject, other, subject):
        each.train()
        each.check()
        each.check_step()
    for each in (subject, other):
        each.check()


def deep_copied() -> int:
    """The model is deep-copied in the middle of training, compiled or not, and both go on."""
    subject = Subject()
    subject.train(2)
    _goes_on(subject, copy.deepcopy(subject.model))
    compiled = copy.deepcopy(subject.run)
    data = batch()
    with torch.no_grad():
        compiled._orig_mod.first.weight.data[1] += 1
        expected = subject.run(data[0])
        subject.twin.load_state_dict(compiled._orig_mod.state_dict())
        assert same_bits(compiled(data[0]), subject.plain(data[0])) and not same_bits(compiled(data[0]), expected)
    subject.check_step()
    return 2


def pickled() -> int:
    """Model, optimizer and scaler are pickled in the middle of training, and both go on."""
    subject = Subject()
    subject.train(2)
    state = pickle.dumps((subject.model, subject.scaler))
    assert len(state) < 3 * sum(p.nbytes for p in subject.model.parameters()), "copies of weights are in the pickle"
    model, scaler = pickle.loads(state)
    assert scaler.get_scale() == subject.scaler.get_scale()
    _goes_on(subject, model)
    return 1


def checkpoint() -> int:
    """A checkpoint is saved in the middle, training goes on, and is taken back to it, live and in a new model."""
    subject = Subject()
    subject.train(2)
    file, draw = io.BytesIO(), torch.get_rng_state()
    parts: Any = (subject.model, subject.optimizer, subject.scaler)
    torch.save([part.state_dict() for part in parts], file)
    subject.train(3)
    expected = [p.detach().clone() for p in subject.model.parameters()]
    fresh = Subject(Model())
    for each in (subject, fresh):
        file.seek(0)
        for part, state in zip((each.model, each.optimizer, each.scaler), torch.load(file), strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(draw)
        each.train(3)
        assert same_bits([p.detach() for p in each.model.parameters()], expected), "another course"
        each.check()
    return 2


FAULTS = {
    (fault.__doc__ or "").rstrip("."): fault
    for fault in (
        fork,
        threads_compile,
        threads_share,
        deleted_before_backward,
        deleted_in_turn,
        deep_copied,
        pickled,
        checkpoint,
    )
}
