"""torch's optimizers become ours at a scaler's step, its clipping or `keep_masters`: what held before goes on."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import ampcompile
from ampcompile.errors import OptimizerError
from ampcompile.optim import OURS, adopt
from tests.scaler.cases import assert_close, assert_equal, params, params_with, scaled

OPTIONS: dict[type, dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adam: {"lr": 0.01},
    torch.optim.AdamW: {"lr": 0.01, "fused": True},
}
kinds = pytest.mark.parametrize("kind", OPTIONS)


def made(kind: Any, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3), (5,))
    return kind([nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes], **OPTIONS[kind])


def train(optimizer: Any, steps: int, *schedules: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for param in params(optimizer):
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    return params(optimizer)


def exchanged(optimizer: Any, how: str | None = None) -> Any:
    """The optimizer, ours from now on: by a scaler's step without gradients, or by `keep_masters`."""
    if how is None:
        ampcompile.GradScaler("cpu", enabled=False).step(optimizer)
    else:
        ampcompile.keep_masters(optimizer, how)
    assert type(optimizer) is OURS[type(optimizer).__mro__[2]]
    return optimizer


@kinds
def test_hooks_go_on_and_another_step_or_class_isnt_taken(kind: Any) -> None:
    optimizer, seen = made(kind), []
    optimizer.register_step_post_hook(lambda *_: seen.append("before"))
    assert adopt(optimizer) is not None and adopt(optimizer) is None
    optimizer.register_step_post_hook(lambda *_: seen.append("later"))
    train(optimizer, 2)
    assert seen == ["before", "later"] * 2
    ampcompile.GradScaler("cpu", enabled=False).clip_grad_norm_(clipped := made(kind), 1.0)
    assert type(clipped) is OURS[kind]

    class Mine(kind):
        pass

    patched, bound = made(kind), made(kind)
    patched.step, bound.step = lambda closure=None: None, bound.step  # the second as Accelerate leaves it
    for other in (patched, bound, Mine(params_with(1.0)), torch.optim.RMSprop(params_with(1.0))):
        former = type(other)
        scaled().step(other)
        assert type(other) is former
    for other in (patched, bound):
        with pytest.raises(
            OptimizerError, match=r"was replaced by .*call keep_masters\(\) first, .*Accelerate's prepare"
        ):
            ampcompile.keep_masters(other)


@pytest.mark.ci
def test_they_pickle_as_torchs_for_processes_without_us() -> None:
    given = [exchanged(made(kind)) for kind in OPTIONS]
    for optimizer in given:
        train(optimizer, 2)
    read = (
        "import pickle, sys; read = pickle.load(sys.stdin.buffer); optimizers = list(map(pickle.loads, read)); "
        "[o.step() for o in optimizers]; print([type(o).__name__ for o in optimizers], 'ampcompile' in sys.modules)"
    )
    pickles = [pickle.dumps(each, protocol) for each in given for protocol in (2, pickle.HIGHEST_PROTOCOL)]
    done = subprocess.run([sys.executable, "-c", read], input=pickle.dumps(pickles), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "['SGD', 'SGD', 'Adam', 'Adam', 'AdamW', 'AdamW'] False"


@kinds
def test_pickles_are_torchs_and_copies_stay_ours(kind: Any) -> None:
    """Of any generation; those with masters stay ours, too. What is in them, `test_machine.py` sees."""
    optimizer = exchanged(made(kind))
    train(optimizer, 2)
    weights, deep = copy.deepcopy((nn.ParameterList(params(optimizer)), optimizer))
    flat, again = copy.copy(optimizer), copy.deepcopy(deep)
    assert all(a is b for a, b in zip(weights, params(deep), strict=True)) and params(flat) is params(optimizer)
    assert type(deep) is type(flat) is type(again) is OURS[kind]
    pickled = [pickle.loads(pickle.dumps(one)) for one in (optimizer, again)]
    assert {type(one) for one in pickled} == {kind}
    expected = train(optimizer, 3)
    for other in (deep, again, *pickled):
        assert_close(train(other, 3), expected)
    assert type(pickle.loads(pickle.dumps(exchanged(made(kind, torch.bfloat16), "remainder")))) is OURS[kind]


@kinds
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scheduled", ["before", "since", "no"])
def test_remove_gives_the_class_back_whatever_was_done_meanwhile(kind: Any, scheduled: str) -> None:
    optimizer, twin = made(kind, torch.bfloat16), made(kind, torch.bfloat16)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedules = [ExponentialLR(optimizer, 0.9)] if scheduled == "before" else []
    exchanged(optimizer)  # by a scaler, before masters are asked for
    handle = ampcompile.keep_masters(optimizer)
    assert optimizer._step_supports_amp_scaling
    if scheduled == "since":
        schedules = [ExponentialLR(optimizer, 0.9)]
    bound = optimizer.step
    if scheduled == "no":
        optimizer.step = bound  # as Accelerate leaves it
    train(optimizer, 2, *schedules)
    handle.remove()
    assert type(optimizer) is kind and str(optimizer) == str(optimizer).partition("    step:")[0]
    assert vars(optimizer).get("_step_supports_amp_scaling", False) is bool(optimizer.defaults.get("fused"))
    assert not optimizer._optimizer_step_pre_hooks
    train(optimizer, 2, *schedules)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(params(twin), params(optimizer), strict=True):
        a.data.copy_(b)
    assert_equal(train(optimizer, 1, *schedules), train(twin, 1))
    if scheduled == "no":
        with pytest.raises(OptimizerError, match="found a step of an optimizer that is torch's again"):
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
    with pytest.raises(OptimizerError, match=r"taken from the optimizer before keep_masters\(\)"):
        bound()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampcompile.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_a_hook_sees_unscaled_gradients_and_isnt_called_in_a_skipped_step(kind: Any, fused: bool, ours: bool) -> None:
    """Under our scaler; torch's gives hooks of a fused optimizer scaled gradients, torch's own too."""
    optimizer, seen = (ampcompile.optim if ours else torch.optim).AdamW(params_with(8.0), lr=0.1, fused=fused), []
    if not ours:
        adopt(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(params(optimizer)[0].grad[0].item()))
    scaler = scaled(kind, init_scale=4.0)
    for value in (8.0, torch.inf):
        params(optimizer)[0].grad = torch.full((3,), value)
        scaler.step(optimizer)
        scaler.update()
    assert seen == ([2.0] if kind is ampcompile.GradScaler or not fused else [8.0, torch.inf])
