"""torch's optimizers become ours at a scaler's step, its clipping or `keep_masters`: what held before goes on."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ampcompile
from ampcompile.errors import ScalerError
from ampcompile.optim import OURS, adopt
from tests.pairs import pairs
from tests.scaler.cases import assert_close, assert_equal, params, params_with, scaled

OPTIONS: dict[type, dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adam: {"lr": 0.01},
    torch.optim.AdamW: {"lr": 0.01, "fused": True},
}
SCHEDULERS = (
    lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, 40),
    lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
)
kinds = pytest.mark.parametrize("kind", OPTIONS)


def made(kind: Any, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3), (5,))
    return kind([nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes], **OPTIONS[kind])


def train(optimizer: Any, steps: int, *schedules: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params(optimizer):
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    return params(optimizer)


def exchanged(optimizer: Any, how: str = "the scaler's step") -> Any:
    """The optimizer, ours from now on."""
    scaler = ampcompile.GradScaler("cpu", enabled=False)
    match how:
        case "the scaler's step":
            scaler.step(optimizer)  # there are no gradients
        case "its clipping":
            scaler.clip_grad_norm_(optimizer, 1.0)
        case _:
            ampcompile.keep_masters(optimizer, how)
    assert type(optimizer) is OURS[type(optimizer).__mro__[2]]
    return optimizer


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "schedule", "how"), pairs(list(OPTIONS), SCHEDULERS, ["the scaler's step", "its clipping"])
)
def test_it_goes_on_in_mid_training_with_the_schedulers_of_before_and_later_ones(
    kind: Any, schedule: Any, how: str
) -> None:
    runs = []
    for ours in (True, False):
        optimizer = made(kind)
        before = schedule(optimizer)
        train(optimizer, 3, before)
        if ours:
            optimizer.zero_grad()
            exchanged(optimizer, how)
        train(optimizer, 3, before, seed=1)
        later = lr_scheduler.ExponentialLR(optimizer, 0.9)
        runs.append((train(optimizer, 3, before, later, seed=2), optimizer.state_dict()["param_groups"]))
        assert not ours or optimizer._ampcompile_step.reason is None
    assert_close(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@kinds
def test_hooks_go_on_and_another_step_or_class_isnt_taken(kind: Any) -> None:
    optimizer, seen = made(kind), []
    optimizer.register_step_post_hook(lambda *_: seen.append("before"))
    assert adopt(optimizer) is not None and adopt(optimizer) is None
    optimizer.register_step_post_hook(lambda *_: seen.append("later"))
    train(optimizer, 2)
    assert seen == ["before", "later"] * 2

    class Mine(kind):  # type: ignore[misc, valid-type]
        pass

    patched, bound = made(kind), made(kind)
    patched.step, bound.step = lambda closure=None: None, bound.step  # the second as Accelerate leaves it
    for other in (patched, bound, Mine(params_with(1.0)), torch.optim.RMSprop(params_with(1.0))):
        former = type(other)
        scaled().step(other)
        assert type(other) is former and not hasattr(other, "_ampcompile_step")
    for other in (patched, bound):
        with pytest.raises(ScalerError, match=r"was replaced by .*call keep_masters\(\) first, .*Accelerate's prepare"):
            ampcompile.keep_masters(other)


@kinds
def test_it_pickles_as_torchs_for_processes_without_us_and_copies_stay_ours(kind: Any) -> None:
    optimizer = made(kind)
    train(optimizer, 2)
    exchanged(optimizer)
    read = (
        "import pickle, sys; o = pickle.load(sys.stdin.buffer); o.step(); print(type(o), 'ampcompile' in sys.modules)"
    )
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        given = pickle.dumps(optimizer, protocol)
        done = subprocess.run([sys.executable, "-c", read], input=given, capture_output=True, check=True)
        assert done.stdout.decode().strip() == f"{kind} False"
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    model = nn.ParameterList(params(optimizer))
    (weights, deep), flat = copy.deepcopy((model, optimizer)), copy.copy(optimizer)
    assert all(a is b for a, b in zip(weights, params(deep), strict=True))
    assert params(flat) is params(optimizer) and flat._ampcompile_step is not optimizer._ampcompile_step
    again = copy.deepcopy(deep)
    assert type(deep) is type(flat) is type(again) is OURS[kind]
    loaded = [pickle.loads(pickle.dumps(each)) for each in (optimizer, again)]
    others = [torch.load(file, weights_only=False), *loaded]
    assert {type(other) for other in others} == {kind}
    expected = train(optimizer, 3)
    for other in (deep, again, *others):
        assert_close(train(other, 3), expected)
    narrow = exchanged(made(kind, torch.bfloat16), "remainder")
    train(narrow, 2)
    other = pickle.loads(pickle.dumps(narrow))
    assert type(other) is OURS[kind]
    assert_equal(train(other, 2), train(narrow, 2))


@kinds
@pytest.mark.parametrize("scheduled", ["before", "since", "no"])
def test_remove_gives_the_class_back_whatever_was_done_meanwhile(kind: Any, scheduled: str) -> None:
    optimizer, twin = made(kind, torch.bfloat16), made(kind, torch.bfloat16)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.9)] if scheduled == "before" else []
    exchanged(optimizer)  # by a scaler, before masters are asked for
    handle = ampcompile.keep_masters(optimizer)
    assert optimizer._step_supports_amp_scaling
    if scheduled == "since":
        schedules = [lr_scheduler.ExponentialLR(optimizer, 0.9)]
    bound = optimizer.step
    if scheduled == "no":
        optimizer.step = bound  # as Accelerate leaves it
    train(optimizer, 2, *schedules)
    handle.remove()
    assert type(optimizer) is kind and not hasattr(optimizer, "_ampcompile_step")
    assert vars(optimizer).get("_step_supports_amp_scaling", False) is bool(optimizer.defaults.get("fused"))
    assert not [hook for hook in optimizer._optimizer_step_pre_hooks.values()]
    train(optimizer, 2, *schedules)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for a, b in zip(params(twin), params(optimizer), strict=True):
            a.copy_(b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(train(optimizer, 1, *schedules), train(twin, 1))
    if scheduled == "no":
        with pytest.raises(ScalerError, match="found a step of an optimizer that is torch's again"):
            bound()


def test_a_step_that_was_bound_before_is_torchs() -> None:
    """Right without masters; a clipping that waits is done in place."""
    optimizer, twin = made(torch.optim.AdamW), made(torch.optim.AdamW)
    bound = optimizer.step
    exchanged(optimizer)
    for _ in range(2):
        for each in (optimizer, twin):
            for param in params(each):
                param.grad = torch.ones_like(param)
        optimizer.clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_(params(twin), 0.5)
        bound()
        twin.step()
        assert_close([p.grad for p in params(optimizer)], [p.grad for p in params(twin)])
    assert_close(params(optimizer), params(twin))
    narrow = made(torch.optim.AdamW, torch.bfloat16)
    bound = narrow.step
    exchanged(narrow, "remainder")
    with pytest.raises(ScalerError, match=r"taken from the optimizer before keep_masters\(\)"):
        bound()


class Doubling(ampcompile.optim.SGD):
    """A subclass with a step of its own: no obstacle for masters."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_plain_subclass_of_ours_is_ours_everywhere() -> None:
    class Mine(ampcompile.optim.AdamW):
        pass

    grads = []
    for kind in (ampcompile.optim.AdamW, Mine):
        optimizer, scaler = kind(params_with(8.0), lr=0.1), scaled(init_scale=4.0)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        grads.append(params(optimizer)[0].grad)
        assert optimizer._ampcompile_step.reason is None
    assert_equal(*([grad] for grad in grads))
    assert (grads[0] == 8).all()
    own = Doubling([nn.Parameter(torch.ones(3).bfloat16())], 2**-12, masters="remainder")
    (param,) = params(own)
    for _ in range(64):
        param.grad = torch.full_like(param, -1.0)
        own.step()
    assert param.float().mean() == 1 + 2**-6


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampcompile.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_a_hook_sees_unscaled_gradients_and_isnt_called_in_a_skipped_step(kind: Any, fused: bool, ours: bool) -> None:
    """Under our scaler; torch's gives hooks of a fused optimizer scaled gradients, torch's own too."""
    optim, seen = (ampcompile.optim if ours else torch.optim), []
    optimizer = optim.AdamW(params_with(8.0), lr=0.1, fused=fused)
    if not ours:
        adopt(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(params(optimizer)[0].grad[0].item()))
    scaler = scaled(kind, init_scale=4.0)
    for value in (8.0, torch.inf):
        params(optimizer)[0].grad = torch.full((3,), value)
        scaler.step(optimizer)
        scaler.update()
    assert seen == ([2.0] if kind is ampcompile.GradScaler or not fused else [8.0, torch.inf])
