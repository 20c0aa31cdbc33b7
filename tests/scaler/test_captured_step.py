"""A step in a CUDA graph: each replay marks the copies that it didn't write, and what the graph needs is checked.

Without a GPU a graph made up stands for it: its replay writes weights, and the copies that the step took, by their
addresses, so that no version, no hook and no table knows of it.
"""

import contextlib
import copy
import ctypes
import logging
import random
import re
import traceback
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import CaptureError, weights
from ampcompile.scaler import captured_step
from ampcompile.weights import Form, weight_stats
from ampcompile.weights.copies import copy_of, freshen
from ampcompile.weights.store import store
from tests.scaler.cases import counts, replays_of
from tests.weights.bindings import bind
from tests.weights.writers import unsampled, unseen

BF16, F16 = torch.bfloat16, torch.float16


def write_unseen(tensor: Tensor, values: Tensor) -> None:
    values = values.to(tensor.dtype).contiguous()
    assert values.shape == tensor.shape and tensor.is_contiguous()
    ctypes.memmove(tensor.data_ptr(), values.data_ptr(), values.nbytes)


class MadeUpGraph:
    """A graph on the CPU, whose replay multiplies weights by -0.5."""

    params: tuple[Tensor, ...] = ()
    taken: set[Any]

    def __init__(self, device: torch.device) -> None:
        self.strict: list[bool] = []
        self.replays = 0

    def warm_up(self, call: Callable[[], Any], strict: bool) -> Any:
        self.strict.append(strict)
        return call()

    def capture(self, call: Callable[[], Any], strict: bool) -> tuple[Any, Any]:
        result = call()
        self.taken = set(store.captured)
        return self, result

    def wait(self) -> None:
        pass

    def pool_bytes(self) -> tuple[int, int]:
        return 0, 0

    def replay(self, graph: Any) -> None:
        assert graph is self
        self.replays += 1
        new = [param.detach() * -0.5 for param in self.params]
        for param, values in zip(self.params, new, strict=True):
            write_unseen(param, values)
            for each in self.taken:
                if each.key == param.untyped_storage()._cdata:
                    write_unseen(each.tensor, values)


def make_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_step, "DEVICE", "cpu")
    monkeypatch.setattr(captured_step, "StepGraph", MadeUpGraph)


class Training:
    """Two weights, the copies that graphs read of them, and a step with our scaler, or of our optimizer without one.

    `act`: what the step does besides.
    """

    schedule: torch.optim.lr_scheduler.LRScheduler
    norm: nn.Module

    def __init__(self, monkeypatch: pytest.MonkeyPatch, optim: Any) -> None:
        self.params = [nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))]
        monkeypatch.setattr(MadeUpGraph, "params", tuple(self.params))
        self.optimizer, self.ours = optim.AdamW(self.params, lr=1e-2, fused=True), optim is ampcompile.optim
        self.scaler, self.binding = ampcompile.GradScaler("cpu"), bind([BF16, BF16])
        self.train = ampcompile.capture_step(self.step, self.optimizer, warm_up=2)
        self.ran, self.act = bytearray(), lambda training: None

    @property
    def calls(self) -> int:
        return len(self.ran)

    def step(self, x: Tensor) -> Tensor:
        self.ran.append(0)
        self.binding.copies(tuple(self.params))
        loss = (self.params[0] * x + self.params[1]).square().mean()
        if self.ours:
            loss.backward()
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.loss = loss.detach()
        self.act(self)
        return loss

    def trained(self, steps: int, x: Tensor) -> None:
        for _ in range(steps):
            self.train(x)

    def read(self, binding: weights.Binding) -> tuple[list[Tensor], int]:
        """The copies that a graph reads now, and how many passes of casts that took."""
        casts = weight_stats().casts
        return binding.copies(tuple(self.params)), weight_stats().casts - casts


@pytest.fixture(params=["torch.optim", "ampcompile.optim"])
def training(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Training:
    make_up(monkeypatch)
    return Training(monkeypatch, ampcompile.optim if request.param == "ampcompile.optim" else torch.optim)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Training:
    """Without a graph: each call runs the step."""
    return Training(monkeypatch, torch.optim)


def right(copies: list[Tensor], params: list[nn.Parameter]) -> bool:
    return all(torch.equal(each, param.detach().to(each.dtype)) for each, param in zip(copies, params, strict=True))


def test_a_replay_keeps_the_copies_that_it_wrote_and_marks_all_others(training: Training) -> None:
    x, others = torch.randn(64), [bind([F16, F16]), bind([BF16, BF16])]
    training.trained(2, x)
    assert training.train._graphs.strict == [False, True] and not training.train.captured
    for turn in range(4):
        for binding in others if turn else []:  # those of another type come after the capture
            training.read(binding)
        pending = (training.params[0] * training.params[0]).sum()
        training.train(x)
        assert training.train.captured and replays_of(training.train) == turn + 1
        copies, casts = training.read(training.binding)
        assert right(copies, training.params) and casts == 0, "the graph wrote them"
        assert right(training.read(others[1])[0], training.params)
        copies, casts = training.read(others[0])
        assert right(copies, training.params) and casts == 1, "the graph didn't write those of another type"
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pending.backward()


def test_copies_that_the_warm_up_read_are_made_fresh_before_the_capture(training: Training) -> None:
    x = torch.randn(64)
    training.trained(2, x)
    ampcompile.invalidate(training.params)
    training.train(x)
    for _ in range(3):
        copies, casts = training.read(training.binding)
        assert right(copies, training.params) and casts == 0, "the step could take them"
        training.train(x)


def test_what_is_cast_elsewhere_in_the_meantime_stays_right(training: Training) -> None:
    """An update without the graph, and copies of weights that the graph writes, or not, unknown to its optimizer."""
    x, average, other = torch.randn(64), *(nn.Parameter(torch.randn(64, 64)) for _ in range(2))
    binding, late, step = bind([BF16] * 2), nn.Parameter(torch.randn(64, 64)), training.train._step

    def averaging(x: Tensor) -> Tensor:
        with torch.no_grad():
            average.mul_(1)
        return step(x)

    training.train._step = averaging
    for turn in range(6):
        binding.copies((average, other))
        training.train(x)
        with torch.no_grad():
            training.params[0].add_(1)
        assert right(training.read(training.binding)[0], training.params)
        if turn > 2:
            assert right(binding.copies((average, other)), [average, other])
            casts = weight_stats().casts
            for each in (average, other):
                unseen(each)[unsampled(each)] += 1
            binding.copies((average, other))
            assert weight_stats().casts == casts, "nothing tells"
            pending = (average * average).sum()
            training.train(x)
            copies = binding.copies((average, other))
            assert right(copies[:1], [average]) and not right(copies[1:], [other])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                pending.backward()
            first = bind([BF16])  # of a weight that wasn't watched at the capture
            first.copies((late,))
            unseen(late)[unsampled(late)] += 1
            training.train(x)
            assert right(first.copies((late,)), [late])
            ampcompile.invalidate(other)


def test_what_another_thread_casts_during_the_capture_counts_for_nothing_in_the_graph(training: Training) -> None:
    """The capture has launched nothing yet when that thread looks: it casts the former numbers."""
    x, step, calls = torch.randn(64), training.train._step, deque[Tensor]()

    def writing(x: Tensor) -> Tensor:
        calls.append(x)
        training.read(training.binding)
        with torch.no_grad():
            training.params[0].add_(1)
        if len(calls) == 3:
            assert freshen([(copy_of(training.params[0], Form(BF16)), training.params[0])])
            assert training.read(training.binding)[1] == 1
            assert training.read(training.binding)[1] == 0
        return step(x)

    training.train._step = writing
    training.trained(4, x)
    assert training.train.captured and len(calls) == 3


def test_evaluation_by_compiled_graphs_reads_the_weights_of_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the type of training, in another, and packed for oneDNN."""
    make_up(monkeypatch)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(16, 64)
    monkeypatch.setattr(MadeUpGraph, "params", tuple(model.parameters()))
    run, other = (
        torch.compile(model, backend="amp", options={"lower": "aot_eager", "dtype": dtype}) for dtype in (BF16, F16)
    )
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-2), ampcompile.GradScaler("cpu", enabled=False)

    def step(x: Tensor) -> dict[str, Tensor]:
        loss = run(x).square().mean()
        loss.backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        return {"loss": loss}

    train, losses = ampcompile.capture_step(step, optimizer), []
    for _ in range(6):
        losses.append(train(x)["loss"])
        with torch.no_grad():
            for compiled, dtype in ((run, BF16), (other, F16)):
                found = [compiled(x) for _ in range(4)]  # the third reading packs weights
                with torch.autocast("cpu", dtype):
                    expected = model(x).float()
                assert all(torch.equal(each, found[0]) for each in found)
                torch.testing.assert_close(found[0], expected, rtol=2e-2, atol=2e-3)
    assert train.captured and losses[3] is losses[4] is losses[5] and not losses[5].requires_grad


def test_inputs_are_written_where_the_graph_reads_them(training: Training) -> None:
    seen: deque[Tensor] = deque()
    train = ampcompile.capture_step(lambda x, more: seen.append(x) or training.step(x * more["by"]), training.optimizer)
    given = [torch.full((64,), float(i)) for i in range(5)]
    for x in given:
        train(x, more={"by": 2})
        assert torch.equal(seen[-1], x) and (seen[-1] is x) == (len(seen) < 4)
    assert len(seen) == 4 and replays_of(train) == 2


OTHER_FORMS: list[tuple[Any, Any]] = [
    (torch.ones(1), 2),
    (torch.ones(64, dtype=BF16), 2),
    (torch.ones(64).requires_grad_(), 2),
    (1.0, 2),
    (torch.ones(64), 3),
    (torch.ones(64), True),
]


def test_each_form_of_arguments_has_a_graph_of_its_own(training: Training) -> None:
    def step(x: Any, by: Any) -> Tensor:
        return training.step((x if isinstance(x, float) else x.detach()) * by)

    train = ampcompile.capture_step(step, training.optimizer, warm_up=2)
    losses = []
    for turn in range(4):
        for x, by in [(torch.ones(64), 2), *OTHER_FORMS]:
            train(x, by)
            losses.append(training.loss)  # which the step only sets: each form has its own
        assert training.calls == 7 * min(turn + 1, 3)
        assert replays_of(train) == 7 * max(turn - 1, 0)
    assert list(map(id, losses[14:21])) == list(map(id, losses[21:])) and len(set(map(id, losses[21:]))) == 7
    lines = repr(train).splitlines()
    assert "7 of 7 forms captured" in lines[0] and "(float32[64], 2): 2 replays, 2 as it is" in lines[1]
    train.forget()
    train(torch.ones(64), 2)
    assert not train.captured and training.calls == 22


class Meter:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.update()

    def update(self) -> None:
        self.number += 1


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps by a number."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1


class Doing:
    """A step that does something besides, of which a replay would do nothing."""

    def __init__(self, training: Training, what: str) -> None:
        self.training, self.what, self.count, self.losses, self.h = training, what, 0, list[Tensor](), torch.zeros(64)
        self.meter, self.random, self.torchs = Meter(), random.Random(0), torch.Generator()
        self.numpys, self.numbers = np.random.default_rng(0), iter(range(99)) if what == "iterate" else None
        self.other = Counting([nn.Parameter(torch.ones(2))], lr=0.1)

    def count_calls(self) -> None:
        self.count += 1

    def collect(self) -> None:
        self.losses.append(self.training.loss)

    def recur(self) -> None:
        self.h = self.h * 0.5 + self.training.loss

    def measure(self) -> None:
        self.meter()

    def draw(self) -> None:
        random.random()

    def draw_by_numpy(self) -> None:
        np.random.rand()

    def draw_by_its_own(self) -> None:
        self.random.random()

    def draw_by_its_own_of_numpy(self) -> None:
        self.numpys.random()

    def draw_by_its_own_of_torch(self) -> None:
        torch.rand(1, generator=self.torchs)

    def iterate(self) -> None:
        next(self.numbers)

    def step_by_another(self) -> None:
        self.other.step()

    def count_in_state(self) -> None:
        self.other.step()

    def step(self, x: Tensor, average: Tensor) -> None:
        self.training.step(x)
        if self.what == "write":
            average.mul_(0.5).add_(1)
        elif self.what == "gradient":
            (average * 2).sum().backward()
        else:
            acts = [self.count_calls, self.collect, self.recur, self.measure, self.draw, self.draw_by_numpy]
            acts += [self.draw_by_its_own, self.draw_by_its_own_of_numpy, self.draw_by_its_own_of_torch]
            acts += [self.iterate, self.step_by_another, self.count_in_state]
            {act.__name__: act for act in acts}[self.what]()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("count_calls", "count, which the step itself changes, from 2 to 3"),
        ("collect", r"losses\[2\], which the step itself changes"),
        ("recur", "h, which the step itself changes"),
        ("draw", "random numbers that the host drew .*draws_elsewhere=True"),
        ("draw_by_numpy", "random numbers that the host drew"),
        ("draw_by_its_own", "random numbers that the host drew"),
        ("draw_by_its_own_of_numpy", "random numbers that the host drew"),
        ("draw_by_its_own_of_torch", "random numbers that the host drew"),
        ("iterate", r"numbers, an iterator that the step reads, .* call next\(\) outside"),
        ("measure", "meter.number, which the step itself changes, from 2 to 3"),
        ("step_by_another", "a step of an optimizer that capture_step wasn't given"),
        ("count_in_state", r"state 0 of group 0 of optimizer 1\['count'\], which the step itself changes, from 2 to 3"),
        ("gradient", "an argument that gets a gradient in the step"),
    ],
)
def test_what_the_step_itself_does_unseen_by_a_replay_is_refused(training: Training, what: str, words: str) -> None:
    doing = Doing(training, what)
    optimizers = [training.optimizer, *[doing.other] * (what == "count_in_state")]
    train = ampcompile.capture_step(doing.step, *optimizers, warm_up=2)
    average = torch.ones(64, requires_grad=what == "gradient")
    for _ in range(2):
        train(torch.ones(64), average)
    count, h, grads = doing.count, doing.h, [param.grad for param in training.params]
    with pytest.raises(CaptureError, match=words):
        train(torch.ones(64), average)
    assert doing.count == count and doing.h is h and [param.grad for param in training.params] == grads
    if what.startswith("draw"):
        train = ampcompile.capture_step(doing.step, *optimizers, warm_up=1, draws_elsewhere=True)
        for _ in range(3):
            train(torch.ones(64), average)
        assert train.captured


def test_an_argument_that_the_step_writes_is_written_back_and_shares_no_memory(training: Training) -> None:
    doing = Doing(training, "write")
    train, average = ampcompile.capture_step(doing.step, training.optimizer, warm_up=2), torch.zeros(64)
    for calls in range(1, 4):
        train(torch.ones(64), average)
        if calls < 3:
            assert torch.equal(average, torch.full((64,), 2 - 2.0 ** (1 - calls)))
    train._graphs.replay = lambda graph: train._forms.popitem()[1].graph.places[1].fill_(7)
    train(torch.ones(64), average)
    assert torch.equal(average, torch.full((64,), 7.0))
    other = ampcompile.capture_step(doing.step, training.optimizer, warm_up=2)
    for _ in range(2):
        other(average, average)
    with pytest.raises(CaptureError, match="two arguments that share memory"):
        other(average, average)


def test_parameters_that_are_added_are_trained_by_the_next_graph(training: Training) -> None:
    more = nn.Parameter(torch.ones(64))
    training.trained(4, torch.ones(64))
    training.optimizer.add_param_group({"params": [more]})
    training.trained(5, torch.ones(64))
    assert any(each is more for each in training.train._params) and training.train.captured


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Afterwards torch's older functions raise, until both are set alike."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


MODES: dict[str, Callable[[], Any]] = {
    "tf32": tf32,
    "grad mode": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default dtype": lambda: patch.object(torch, "get_default_dtype", lambda: torch.float64),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_state_of_torch_belongs_to_the_form(training: Training, mode: str) -> None:
    training.trained(4, torch.ones(64))
    with MODES[mode](), contextlib.suppress(RuntimeError):
        training.train(torch.ones(64))
    assert len(counts(training.train)) == 2


def test_which_parameters_have_gradients_and_which_modules_train_belongs_to_the_form(training: Training) -> None:
    training.norm = nn.Dropout()
    training.train = ampcompile.capture_step(training.step, training.optimizer, warm_up=2)
    training.act = lambda training: training.norm
    training.trained(4, torch.ones(64))
    training.norm.eval()
    training.trained(1, torch.ones(64))
    training.norm.train()
    training.params[0].grad = torch.ones(64, 64)
    training.trained(1, torch.ones(64))
    assert len(counts(training.train)) == 3 and training.calls == 5


def test_a_number_that_differs_at_each_call_is_named(training: Training) -> None:
    train = ampcompile.capture_step(lambda x, turn: training.step(x * turn), training.optimizer, warm_up=2)
    for turn in range(2):
        train(torch.ones(64), turn)
    with pytest.warns(ampcompile.AmpWarning, match=r"a number .* differs at each call, the last 2 .*: pass a tensor"):
        train(torch.ones(64), 2)
    for turn in range(3, 90):
        train(torch.ones(64), turn)
    assert not train.captured and training.calls == 90 and len(counts(train)) == 2


def test_sixteen_forms_are_captured_and_one_warning_lists_their_sizes(training: Training) -> None:
    train = ampcompile.capture_step(lambda x: training.step(x.sum()), training.optimizer, warm_up=1)
    with pytest.warns(ampcompile.AmpWarning, match=r"more than 16 forms .*float32\[16\].*pad to a few") as warned:
        for _ in range(4):
            for size in range(1, 18):
                train(torch.ones(size))
    assert len(warned) == 1 and "16 of 17 forms captured" in repr(train)
    assert training.calls == 17 + 16 + 3 and replays_of(train) == 3 * 16


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("optim", [torch.optim, ampcompile.optim], ids=["torch.optim", "ampcompile.optim"])
def test_numbers_of_torchs_optimizers_may_not_change_and_state_is_captured_anew(
    graph: bool, optim: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where each call runs the step, on a CPU."""
    if graph:
        make_up(monkeypatch)
    x, training = torch.randn(64), Training(monkeypatch, optim)
    if optim is torch.optim:
        training.optimizer.register_step_post_hook(lambda *_: None)  # or it becomes one of ours
    training.train = ampcompile.capture_step(training.step, training.optimizer, warm_up=2)
    group = training.optimizer.param_groups[0]
    training.trained(4, x)
    torch.optim.lr_scheduler.StepLR(training.optimizer, 100)  # keeps a key of its own in the groups
    group["lr"] = float("0.01")  # the same number
    training.trained(1, x)
    calls = training.calls
    assert calls == (3 if graph else 5)
    caplog.set_level(logging.INFO, logger="ampcompile")
    group["lr"] = 1e-3
    if optim is torch.optim:
        with pytest.raises(
            CaptureError, match=r"lr of group 0 of optimizer 0 changed since the capture, from 0.01 to 0.001,"
        ):
            training.train(x)
        group["lr"] = 1e-2
        training.train(x)
    else:
        training.trained(3, x)
        assert training.calls == calls + (0 if graph else 3) and not caplog.text, "numbers follow"
        group["maximize"], calls = True, training.calls
        training.trained(3, x)
        assert (
            training.calls == calls + (2 if graph else 3)
            and "captured anew, as this changed: maximize of group 0" in caplog.text
        )
    moves = {
        "state of optimizer 0": lambda: training.optimizer.load_state_dict(
            copy.deepcopy(training.optimizer.state_dict())
        ),
        "memory of a weight": lambda: setattr(training.params[0], "data", training.params[0].detach().clone()),
    }
    for what in [*moves][: 1 + graph]:
        moves[what]()
        calls = training.calls
        training.trained(4, x)
        assert training.calls == calls + (2 if graph else 4) and f"as this changed: {what}" in caplog.text


SETTINGS = {"SGD": ("lr", "weight_decay", "momentum"), "AdamW": ("lr", "weight_decay", "betas", "eps")}
SCHEDULES = (
    lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("draw", range(4))
def test_a_setting_that_the_step_itself_changes_is_refused(
    draw: int, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drawn optimizer, before or after its step, by a scheduler or in a group."""
    kind = random.choice([*SETTINGS])
    setting = random.choice(SETTINGS[kind])
    param = nn.Parameter(torch.randn(64))
    optimizer = getattr(ampcompile.optim, kind)([param], lr=1e-2, weight_decay=0.1, fused=True)
    if setting == "momentum":
        optimizer.param_groups[0]["momentum"] = 0.9
    schedule = random.choice(SCHEDULES)(optimizer) if setting == "lr" and random.random() < 0.7 else None
    early = schedule is None and random.random() < 0.5  # torch warns of a scheduler that steps first

    def change() -> None:
        if schedule is not None:
            schedule.step()
        else:
            values = (0.9, random.random()) if setting == "betas" else random.random()
            optimizer.param_groups[0][setting] = values

    def step(x: Tensor) -> None:
        (param * x).sum().backward()
        if early:
            change()
        optimizer.step()
        optimizer.zero_grad()
        if not early:
            change()

    if graph:
        make_up(monkeypatch)
        monkeypatch.setattr(MadeUpGraph, "params", (param,))
    train = ampcompile.capture_step(step, optimizer, warm_up=2)
    with pytest.raises(CaptureError, match="which the step itself changes"):
        for _ in range(4):
            train(torch.ones(64))


def test_a_learning_rate_that_is_a_tensor_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=torch.tensor(0.1))
    param.grad = torch.ones(4)
    train = ampcompile.capture_step(optimizer.step, optimizer, warm_up=1)
    for _ in range(4):
        train()
        optimizer.param_groups[0]["lr"].mul_(0.5)
    assert replays_of(train) == 3 and train._graphs.strict == [False]
    grad = param.grad
    param.grad = grad.clone()
    with pytest.raises(CaptureError, match="found gradients that aren't those before the capture"):
        train()
    param.grad = grad
    train()
    optimizer.zero_grad()
    train()
    assert len(counts(train)) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.Adam, "found Adam with capturable=False, .*: make it with fused=True or capturable="),
        (torch.optim.RMSprop, "found RMSprop .* make it with capturable=True"),
    ],
)
def test_counts_on_the_host_are_refused(make: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    train = ampcompile.capture_step(lambda: None, make([nn.Parameter(torch.ones(4))]), warm_up=1)
    train()
    with pytest.raises(CaptureError, match=words):
        train()


@pytest.mark.parametrize("word", ["called a synchronizing CUDA operation", "operation not permitted when capturing"])
def test_a_wait_for_the_gpu_is_named_and_other_errors_are_the_users(training: Training, word: str) -> None:
    errors: list[Exception] = [RuntimeError(word), RuntimeError("shapes cannot be multiplied"), ValueError(word)]

    def step() -> None:
        raise errors.pop(0)

    train = ampcompile.capture_step(step, training.optimizer)
    with pytest.raises(CaptureError, match=f"found an operation that waits .*{word}") as caught:
        train()
    assert isinstance(caught.value.__cause__, RuntimeError)
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind):
            train()


def test_torchs_own_step_that_is_not_capturable_is_no_wait(training: Training) -> None:
    def step() -> None:
        raise RuntimeError("Attempting CUDA graph capture of step() for AdamW but param_groups' capturable is False.")

    with pytest.raises(CaptureError, match=r"found an optimizer whose step is torch's own .* expected capturable=True"):
        ampcompile.capture_step(step, training.optimizer)()


def test_a_capture_that_fails_leaves_no_copy_that_counts_as_fresh(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64)
    training.trained(2, x)
    before = [param.detach().clone() for param in training.params]

    def fail(self: MadeUpGraph, call: Callable[[], Any], strict: bool) -> None:
        call()
        for param, values in zip(training.params, before, strict=True):
            write_unseen(param, values)  # a capture runs nothing
        raise ValueError("broken")

    monkeypatch.setattr(MadeUpGraph, "capture", fail)
    with pytest.raises(ValueError, match="broken"):
        training.train(x)
    assert not training.train.captured and store.capture is None
    copies, casts = training.read(training.binding)
    assert right(copies, training.params) and casts == 1


def test_parameters_are_plain_and_on_one_device() -> None:
    on_two = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(CaptureError, match="cpu and meta"):
        ampcompile.capture_step(print, torch.optim.SGD(on_two))
    odd = nn.Parameter(torch.ones(2).as_subclass(type("Odd", (Tensor,), {})))
    with pytest.raises(CaptureError, match="found a parameter that is a"):
        ampcompile.capture_step(print, torch.optim.SGD([odd]))
    negated = nn.Parameter(torch.ones(2, dtype=torch.cfloat).conj().imag)
    with torch.inference_mode():
        inferred = nn.Parameter(torch.ones(2))
    for param, name in (negated, "a negated view"), (inferred, "an inference tensor"):
        with pytest.raises(CaptureError, match=f"found a parameter that is {name}, expected plain ones: make one of"):
            ampcompile.capture_step(print, torch.optim.SGD([param]))
        plain = nn.Parameter(param.detach().resolve_neg().clone())
        assert "0 of 0 forms" in repr(ampcompile.capture_step(print, torch.optim.SGD([plain])))
    with pytest.raises(CaptureError, match="warm_up=0"):
        ampcompile.capture_step(print, torch.optim.SGD([nn.Parameter(torch.ones(2))]), warm_up=0)


@pytest.mark.parametrize(
    "what", [None, "adam", torch.optim.SGD, nn.ReLU(), [torch.optim.SGD([nn.Parameter(torch.ones(2))])], (), print]
)
def test_what_is_no_optimizer_is_refused(what: Any) -> None:
    with pytest.raises(CaptureError, match=r"as an optimizer, expected those .*capture_step\(step, optimizer\)"):
        ampcompile.capture_step(print, torch.optim.SGD([nn.Parameter(torch.ones(2))]), what)


def test_what_a_graph_can_neither_copy_nor_compare_is_refused(training: Training) -> None:
    for batch in (np.ones(64, np.float32), UserDict(x=torch.ones(64)), {1.0}):
        with pytest.raises(CaptureError, match=rf"found a {type(batch).__name__} among the arguments, .*from_numpy"):
            training.train(batch)
    assert not training.train._graphs.strict, "nothing ran"
    training.train(torch.ones(64))


def test_on_a_cpu_each_call_is_a_step_and_repr_says_so(on_cpu: Training) -> None:
    for calls in range(6):
        assert re.search(r"Training.step\): each call runs it, as its parameters", repr(on_cpu.train))
        before, x = [param.detach().clone() for param in on_cpu.params], torch.randn(64)
        assert torch.equal(on_cpu.train(x), (before[0] * x + before[1]).square().mean()) and on_cpu.calls == calls + 1
        assert not torch.equal(on_cpu.params[0], before[0]) and not on_cpu.train.captured


def test_on_a_cpu_a_later_form_that_cant_be_captured_takes_each_step_once(on_cpu: Training) -> None:
    counts, errors = [0], [ValueError("mine")]

    def step(x: Tensor) -> Tensor:
        if len(x) == 1:
            counts[0] += 1
            if counts[0] == 4:
                raise errors.pop()
        return on_cpu.step(x.sum())

    train = ampcompile.capture_step(step, on_cpu.optimizer, warm_up=2)
    for _ in range(3):
        train(torch.ones(2))
    train(torch.ones(1))
    train(torch.ones(1))
    with pytest.warns(ampcompile.AmpWarning, match=r"can't be captured, .*counts\[0\], which the step itself changes"):
        train(torch.ones(1))
    assert counts == [3] and on_cpu.calls == 6
    with pytest.raises(ValueError, match="mine"):
        train(torch.ones(1))
    assert counts == [4]


READS: dict[str, Callable[[Training], Any]] = {
    "item": lambda training: training.loss.item(),
    "tolist": lambda training: training.loss.tolist(),
    "bool": lambda training: bool(training.loss),
    "float": lambda training: float(training.loss),
    "int": lambda training: int(training.loss),
    "str": lambda training: str(training.loss),
    "get_scale": lambda training: training.scaler.get_scale(),
}


@pytest.mark.parametrize("read", READS)
def test_on_a_cpu_a_number_that_the_step_reads_is_refused_in_the_last_call_to_warm_up(
    on_cpu: Training, read: str
) -> None:
    on_cpu.act = READS[read]
    on_cpu.train(torch.ones(64))
    with pytest.raises(CaptureError, match=r"found an operation that waits .*Tensor\.\w+\(\) reads a number") as caught:
        on_cpu.train(torch.ones(64))
    lines = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert "step" in lines and on_cpu.loss.item() == on_cpu.loss.tolist(), "afterwards numbers may be read"
    assert not {"item", "tolist", "__bool__"} & vars(Tensor).keys()


def test_before_the_capture_and_behind_it_repr_says_where_a_step_is(training: Training) -> None:
    for calls in range(4):
        words = "1 of 1 forms captured" if calls == 3 else "before the capture, which comes after 2 calls"
        assert words in repr(training.train)
        training.train(torch.ones(64))
