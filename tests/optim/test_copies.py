"""After a step of ours no copy of a weight is cast; after one that may have written more, the copies are right."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampcompile
from ampcompile import weights
from ampcompile.kernels import native
from ampcompile.weights.step import QUANTIZED
from tests.scaler.cases import assert_equal, assert_quantized, fill
from tests.weights.bindings import bind
from tests.weights.writers import unseen

KINDS = {
    "SGD": lambda params, **options: ampcompile.optim.SGD(params, lr=0.1, momentum=0.9, **options),
    "AdamW": lambda params, **options: ampcompile.optim.AdamW(params, lr=0.1, **options),
    "AdamW fused": lambda params, **options: ampcompile.optim.AdamW(params, lr=0.1, fused=True, **options),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Model:
    """Parameters whose copies a graph reads."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.params = [nn.Parameter(torch.randn(300, 70).to(dtype)), nn.Parameter(torch.randn(40).to(dtype))]
        self.binding = bind([torch.bfloat16] * len(self.params))
        self.casts_until()

    def casts_until(self) -> int:
        """Read all copies, which are right; return how many were cast for it."""
        before = weights.weight_stats().casts
        copies = self.binding.copies(self.params)
        assert_equal(copies, [param.detach().bfloat16() for param in self.params])
        return weights.weight_stats().casts - before


def patched(optimizer: Any) -> Any:
    """As Accelerate patches a step, without a word of what it wraps."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)
    return optimizer


def scheduled(optimizer: Any) -> Any:
    ExponentialLR(optimizer, 0.9)
    return optimizer


def clipped(optimizer: Any) -> Any:
    """With the hook that waits for its steps."""
    fill(optimizer.param_groups[0]["params"], 9)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return optimizer


def through_a_scaler(optimizer: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    step = optimizer.step

    def scaled(*_: Any) -> None:
        optimizer.step = step
        scaler.step(optimizer)
        scaler.update()
        optimizer.step = scaled

    optimizer.step = scaled
    return optimizer


LOOPS = {
    "plain": lambda optimizer: optimizer,
    "patched": patched,
    "scheduled": scheduled,
    "patched, scheduled": lambda optimizer: patched(scheduled(optimizer)),
    "clipped": clipped,
    "scaler": through_a_scaler,
}


@kinds
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("another", [False, True])
def test_nothing_is_cast_after_a_step(kind: str, loop: str, another: bool) -> None:
    if another:
        torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    model, beside = Model(), Model()
    optimizer, other = LOOPS[loop](KINDS[kind](model.params)), torch.optim.SGD(beside.params, lr=0.1)
    for step in range(3):
        fill(model.params, step)
        optimizer.step()
        assert model.casts_until() == beside.casts_until() == 0
        fill(beside.params, step)
        other.step()
        assert model.casts_until() == 0 < beside.casts_until()


SPECIAL = torch.tensor(
    [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-46, 65504.0, 65520.0, 3.39e38, 6e-8, 1.0]
)


@kinds
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("skips", [False, True])
def test_copies_that_are_read_as_float32_are_written_rounded_and_have_the_bits_of_a_cast(
    kind: str, low: torch.dtype, skips: bool
) -> None:
    """As on a CPU that multiplies in float32; a float16 or bfloat16 copy of the same weight is cast in the step."""
    values = torch.cat([SPECIAL, torch.randn(300 * 70 - len(SPECIAL)) * 10.0 ** torch.randint(-8, 5, (300 * 70 - 12,))])
    params = [nn.Parameter(values.view(300, 70)), nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(9, 33).t())]
    slots, other = [*params, params[0]], torch.float16 if low is torch.bfloat16 else torch.bfloat16
    binding = bind([low, low, low, other], wide=[True, True, True, False])
    optimizer = KINDS[kind](params)

    def read() -> int:
        before = weights.weight_stats().casts
        copies = binding.copies(slots)
        rounded = [param.detach().to(low).float() for param in params]
        assert_equal(copies, [*rounded, params[0].detach().to(other)])
        return weights.weight_stats().casts - before

    read()
    for step in range(3):
        fill(params, step)
        if skips and kind == "AdamW fused":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        params[0].grad[0, : len(SPECIAL)] = 0.0
        before = values.clone()
        optimizer.step()
        assert read() == 0
        assert torch.equal(values.isnan(), before.isnan())


@kinds
def test_nothing_is_cast_in_a_closure_nor_after_its_step(kind: str) -> None:
    model = Model()
    optimizer = KINDS[kind](model.params)
    for step in range(3):

        def closure(step: int = step) -> int:
            fill(model.params, step)
            return model.casts_until()

        assert optimizer.step(closure) == 0 == model.casts_until()


def test_quantized_copies_are_written_by_the_step() -> None:
    param = nn.Parameter(torch.randn(32, 48))
    binding = bind([QUANTIZED.dtype])
    binding.copies([param])
    optimizer = KINDS["AdamW"]([param])
    casts = weights.weight_stats().casts
    for step in range(3):
        fill([param], step)
        optimizer.step()
        assert_quantized([param.detach()], binding.copies([param]))
    assert weights.weight_stats().casts == casts


@kinds
def test_masters_step_without_a_cast_of_other_weights(kind: str) -> None:
    beside = Model()
    params = [nn.Parameter(torch.randn(30, 7).bfloat16())]
    optimizer = KINDS[kind](params, masters="remainder")
    for step in range(2):
        fill(params, step)
        optimizer.step()
        assert beside.casts_until() == 0


@kinds
@pytest.mark.parametrize("torchs", [False, True])
def test_a_step_of_torchs_is_reported(kind: str, torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fused step raises no version, and one number is written; what other optimizers own stays as it is."""
    monkeypatch.setattr(native, "available", lambda *_: False)
    model, beside = Model(), Model()
    optimizer = KINDS[kind](model.params, weight_decay=0)
    other = torch.optim.SGD(beside.params, lr=0.1) if torchs else KINDS["SGD"](beside.params)
    fill(beside.params, 7)
    other.step()
    beside.casts_until()
    for _ in range(3):
        model.params[0].grad = torch.zeros(300, 70)
        model.params[0].grad[151, 33] = 1.0
        optimizer.step()
        assert model.casts_until() > 0 == beside.casts_until()


def write(param: nn.Parameter, value: float) -> None:
    """One number, unseen, where no sample looks."""
    unseen(param.detach())[151, 33] = value


HOOKS = {
    "before": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "everywhere": lambda _, hook: register_optimizer_step_post_hook(hook),
}


@kinds
@pytest.mark.parametrize("when", HOOKS)
@pytest.mark.parametrize("whose", ["own", "another's"])
def test_a_users_hook_may_write_any_weight(kind: str, when: str, whose: str) -> None:
    model, beside = Model(), Model()
    optimizer, other = KINDS[kind](model.params), KINDS["SGD"](beside.params)
    for each, of in ((model, optimizer), (beside, other)):
        fill(each.params, 0)
        of.step()
        each.casts_until()
    written = (model if whose == "own" else beside).params[0]
    numbers = iter(range(2, 9))
    handle = HOOKS[when](optimizer, lambda *_: write(written, next(numbers)))
    try:
        for step in range(3):
            fill(model.params, step)
            optimizer.step()
            assert model.casts_until() > 0
            beside.casts_until()
    finally:
        handle.remove()
    fill(model.params, 5)
    optimizer.step()
    assert model.casts_until() == 0


class Writing(ampcompile.optim.AdamW):
    """A subclass whose step writes more; `other`: the weight."""

    other: Any = None

    def step(self, closure: Any = None) -> Any:
        write(self.other, self.count)
        result = super().step(closure)
        write(self.other, self.count + 1)
        self.count += 2
        return result

    count = 3.0


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_a_subclass_may_write_any_weight(whose: str) -> None:
    model, beside = Model(), Model()
    optimizer, other = Writing(model.params, lr=0.1), KINDS["SGD"](beside.params)
    fill(beside.params, 0)
    other.step()
    beside.casts_until()
    optimizer.other = (model if whose == "own" else beside).params[0]
    for step in range(3):
        fill(model.params, step)
        optimizer.step()
        model.casts_until()
        beside.casts_until()


@pytest.mark.parametrize("kind", [torch.optim.SGD, ampcompile.optim.SGD])
def test_a_step_patched_on_the_class_may_write_any_weight(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, beside = Model(), Model()
    other = KINDS["AdamW"](beside.params)
    fill(beside.params, 0)
    other.step()
    beside.casts_until()
    step, numbers = kind.step, iter(range(2, 9))

    @functools.wraps(step)
    def stepping(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        write(beside.params[0], next(numbers))
        return result

    vars(stepping).pop("hooked", None)  # torch calls hooks around it, then
    monkeypatch.setattr(kind, "step", stepping)
    optimizer = kind(model.params, lr=0.1)
    for count in range(3):
        fill(model.params, count)
        optimizer.step()
        model.casts_until()
        beside.casts_until()


def test_a_step_that_failed_leaves_right_copies_and_the_next_casts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = KINDS["AdamW"](model.params)

    def failing() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(failing)
    monkeypatch.setattr(native, "available", lambda *_: False)
    model.params[0].grad = torch.ones(300, 70)
    optimizer.param_groups[0]["lr"] = "not a number"
    with pytest.raises(TypeError):
        optimizer.step()
    monkeypatch.undo()
    optimizer.param_groups[0]["lr"] = 0.1
    for step in range(3):
        fill(model.params, step)
        optimizer.step()
        assert model.casts_until() == 0 or step < 2
