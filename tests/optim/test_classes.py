"""`ampcompile.optim`: what its classes say, take over and refuse; that a step is torch's, `test_machine.py` sees."""

import copy
import functools
import inspect
import logging
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.testing._internal.common_optimizers import optim_db

import ampcompile
from ampcompile.errors import AmpWarning, OptimizerError
from ampcompile.kernels import native
from tests.scaler.cases import all_params, assert_close, assert_equal, fill, pending, scaled

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
}
names = pytest.mark.parametrize("name", OPTIONS)
SHAPES = ((3, 5), (7,), (), (2, 3, 4))


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def narrow() -> list[nn.Parameter]:
    return weights(torch.bfloat16)


def ours(name: str, held: Any = None, optim: Any = ampcompile.optim, **options: Any) -> Any:
    return getattr(optim, name)(weights() if held is None else held, **OPTIONS[name], **options)


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    mine, theirs = (ours(name, weights(dtype), optim, **options) for optim in (ampcompile.optim, torch.optim))
    return mine, theirs


def fill_all(step: int, *optimizers: Any) -> None:
    for each in optimizers:
        fill(all_params(each), step)


def clip(optimizer: Any, max_norm: float = 0.5) -> torch.Tensor:
    """By the method of an optimizer of ours, else by torch's function."""
    if hasattr(optimizer, "clip_grad_norm_"):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(all_params(optimizer), max_norm)


def assert_same_weights(mine: Any, theirs: Any) -> None:
    assert_close(all_params(mine), all_params(theirs))


def assert_alike(mine: Any, theirs: Any, compare: Callable[..., None] = assert_close) -> None:
    """Weights, and states as `state_dict` has them: their keys and layouts too."""
    compare(all_params(mine), all_params(theirs))
    saved, expected = mine.state_dict(), theirs.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert list(saved["state"][number]) == list(state)
        for key, value in state.items():
            held = saved["state"][number][key]
            assert type(held) is type(value)
            if isinstance(value, torch.Tensor):
                assert (held.dtype, held.device, held.shape, held.stride()) == (
                    value.dtype,
                    value.device,
                    value.shape,
                    value.stride(),
                )
                (assert_equal if key == "step" else compare)([held], [value])


def test_bfloat16_without_masters_is_warned_of_and_the_printed_optimizer_says_why_its_step_is_torchs() -> None:
    with pytest.warns(AmpWarning, match=r'without masters, .* rounded away. Add masters="remainder"'):
        optimizer = ours("AdamW", narrow())
    assert str(optimizer).endswith("    step: torch's own: a parameter is torch.bfloat16\n)")
    assert "    step: fused\n    held: 14." in str(ours("AdamW", narrow(), masters="remainder"))
    late = ampcompile.optim.SGD(weights(), lr=0.1, momentum=0.9, dampening=0.1)
    for words in ("torch's own: a first step with dampening isn't like the others", "fused"):
        fill_all(0, late)
        late.step()
        assert str(late).endswith(f"    step: {words}\n)")


@names
def test_the_class_is_torchs_with_four_more_arguments(name: str) -> None:
    kind, torchs_kind = getattr(ampcompile.optim, name), getattr(torch.optim, name)
    given, expected = (list(inspect.signature(each).parameters.values()) for each in (kind, torchs_kind))
    assert [p.name for p in given] == [p.name for p in expected] + ["masters", "states", "names", "seed"]
    assert [p.default for p in given[:-4]] == [p.default for p in expected]
    mine, theirs = pair(name)
    assert issubclass(kind, torchs_kind) and str(mine) == str(theirs)[:-1] + "    step: fused\n)"
    for bad in ({"lr": -1.0}, {"weight_decay": -1.0}, {"fused": True, "foreach": True}):
        messages = []
        for each in (kind, torchs_kind):
            with pytest.raises((ValueError, RuntimeError)) as error:
                each(weights(), **bad)
            messages.append(str(error.value))
        assert messages[0] == messages[1]

    class Mine(kind):
        def __init__(self, one: Any) -> None:
            super().__init__(one)

    assert list(inspect.signature(Mine).parameters) == ["one"]
    assert list(inspect.signature(ours(name).step).parameters) == ["closure"]


CONFIGURATIONS = [
    pytest.param(info, config, id=f"{info.optim_cls.__name__} {config.desc}")
    for info in optim_db
    if info.optim_cls.__name__ in OPTIONS
    for config in info.optim_inputs_func(device="cpu")
]


VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # without them torch rounds otherwise


@pytest.mark.parametrize(("info", "config"), CONFIGURATIONS)
@pytest.mark.parametrize("impl", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
def test_each_configuration_of_torchs_own_tests(info: Any, config: Any, impl: dict[str, Any]) -> None:
    """Also where torch's own steps and those by our scaler take turns: state is laid out as torch's, with its bits."""

    def made(kind: Any) -> Any:
        held = [nn.Parameter(torch.linspace(-2, 2, 1000).view(25, 40).t()), nn.Parameter(torch.ones(16, 8))]
        return kind(held, **copy.deepcopy({**config.kwargs, **impl}))

    kind, scaler = getattr(ampcompile.optim, info.optim_cls.__name__), scaled(init_scale=2.0**10)
    try:
        mine, in_turn, theirs = made(kind), made(info.optim_cls), made(info.optim_cls)
    except (ValueError, RuntimeError) as error:  # a tensor for a rate, with foreach
        with pytest.raises(type(error), match=re.escape(str(error))):
            made(kind)
        return
    for step in range(4):
        for each in (mine, in_turn, theirs):
            fill(all_params(each), step)
            for param in all_params(each):  # of very different sizes, so that a formula that cancels shows
                size = 10.0 ** torch.randint(-3, 4, param.shape, generator=torch.Generator().manual_seed(step))
                param.grad *= size * (2.0**10 if each is in_turn and step % 2 else 1.0)
        mine.step()
        theirs.step()
        scaler.step(in_turn) if step % 2 else in_turn.step()
        scaler.update(2.0**10)
        in_turn.load_state_dict(copy.deepcopy(in_turn.state_dict()))
    # MKL's square root, in torch's other Adams, is one unit in the last place off for one number in five
    exact = VECTORS and (impl.get("fused") or info.optim_cls is torch.optim.SGD)
    for each in (mine, in_turn):
        assert_alike(each, theirs, assert_equal if exact else assert_close)


def test_the_mark_belongs_to_the_instance_and_to_fused() -> None:
    for name in OPTIONS:
        for unmarked in (getattr(ampcompile.optim, name), ours(name)):
            assert not hasattr(unmarked, "_step_supports_amp_scaling")
        for marked in (ours(name, fused=True), ours(name, narrow(), masters="remainder")):
            for each in (marked, copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
                assert each._step_supports_amp_scaling


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampcompile.GradScaler])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_clipping_of_scaled_gradients_is_refused_and_the_next_right_step_reads_nothing_of_it(
    kind: Any, hooked: bool
) -> None:
    mine, theirs = both = pair("AdamW", fused=True)
    scalers = [scaled(each, init_scale=64.0) for each in (kind, torch.amp.GradScaler)]
    for each in both:
        if hooked:
            each.register_step_post_hook(lambda *_: None)
        fill(all_params(each), 0, 64.0)
    before = [p.detach().clone() for p in all_params(mine)]
    clip(mine)
    with pytest.raises(OptimizerError, match=r"expected them unscaled before.*Call scaler.unscale_\(optimizer\) first"):
        scalers[0].step(mine)
    assert not hasattr(mine, "grad_scale") and not hasattr(mine, "found_inf") and pending(mine) is None
    assert_equal(all_params(mine), before)
    for scaler, each in zip(scalers, both, strict=True):
        scaler.unscale_(each)
        clip(each)
        scaler.step(each)
    assert_same_weights(mine, theirs)


def test_a_clipping_that_is_given_parameters_names_the_way_to_write_it() -> None:
    for given in (weights(), nn.Linear(2, 2).parameters(), weights()[0]):
        with pytest.raises(
            OptimizerError, match=r"as max_norm, expected a number: .* write optimizer.clip_grad_norm_\(1.0\)"
        ):
            ours("AdamW").clip_grad_norm_(given, 1.0)


# Closures, hooks, wrappers, patches


@names
def test_a_closures_gradients_are_those_of_the_step_and_a_clipping_in_it_too(name: str) -> None:
    mine, theirs = pair(name)

    def closure(optimizer: Any, inside: bool) -> str:
        assert torch.is_grad_enabled()
        fill_all(1, optimizer)
        if inside:
            clip(optimizer)
        return "loss"

    for inside in (False, True):
        fill_all(0, mine, theirs)
        clip(mine, 0.1)
        for each in (mine, theirs):
            with torch.no_grad():
                assert each.step(functools.partial(closure, each, inside)) == "loss"
        assert_alike(mine, theirs)
    assert mine.step(closure=lambda: 7) == 7


@names
@pytest.mark.parametrize("another", ["before", "after", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hooks_run_once_whoever_takes_the_step(name: str, another: str, dtype: torch.dtype) -> None:
    if another == "before":
        ours(name, optim=torch.optim)
    mine, seen = ours(name, weights(dtype)), []
    if another == "after":
        ours(name, optim=torch.optim)
    mine.register_step_pre_hook(lambda *_: seen.append("before"))
    mine.register_step_post_hook(lambda *_: seen.append("after"))
    fill_all(0, mine)
    mine.step()
    assert seen == ["before", "after"]
    mine.register_step_pre_hook(lambda *_: ((mine, lambda: "given"), {}))
    assert mine.step() == "given"


class Wrapper:
    """As frameworks wrap optimizers: an object of a class made of theirs and of ours, whose constructor never ran."""

    def __init__(self, optimizer: Any) -> None:
        self.wrapped = optimizer
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", (Wrapper, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


@names
@pytest.mark.parametrize("hooked", [False, True])
def test_a_wrapper_of_another_class_clips_and_steps_what_it_wraps(name: str, hooked: bool) -> None:
    """`hooked`: torch calls hooks around its step, as loading a state lets it wrap the step of the wrapper's class."""
    mine, theirs = pair(name)
    wrapper = Wrapper(mine)
    assert isinstance(wrapper, getattr(torch.optim, name))
    if hooked:
        wrapper.load_state_dict(copy.deepcopy(mine.state_dict()))
        assert type(wrapper).step.hooked
    for step in range(3):
        fill_all(step, mine, theirs)
        before = [p.grad.clone() for p in all_params(mine)]
        clip(wrapper)
        assert pending(mine) is not None
        clip(theirs)
        wrapper.step()
        theirs.step()
        assert_equal([p.grad for p in all_params(mine)], before)
        if step:
            wrapper.zero_grad()
    if not hooked:
        key = "momentum_buffer" if name == "SGD" else "exp_avg"
        assert_equal([wrapper.state_dict()["state"][0][key]], [mine.state[all_params(mine)[0]][key]])
        wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()))  # lands on the wrapper, as with torch's class
        assert str(wrapper) and wrapper.step() is None
    assert_same_weights(mine, theirs)


class Doubling(ampcompile.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for param in all_params(self):
            param.grad.mul_(2.0)
        return super().step(closure)


def test_a_subclass_with_a_step_of_its_own_gets_gradients_that_are_clipped_and_may_have_masters() -> None:
    mine, theirs = Doubling(weights(), lr=0.1), torch.optim.SGD(weights(), lr=0.1)
    for step in range(2):
        fill_all(step, mine, theirs)
        clip(mine)
        clip(theirs)
        assert_close([p.grad for p in all_params(mine)], [p.grad for p in all_params(theirs)])
        for param in all_params(theirs):
            param.grad.mul_(2.0)
        mine.step()
        theirs.step()
    assert_same_weights(mine, theirs)
    param = nn.Parameter(torch.ones(3).bfloat16())
    own = Doubling([param], 2**-13, masters="remainder")
    for _ in range(64):
        param.grad = torch.full_like(param, -1.0)
        own.step()
    assert param.float().mean() == 1 + 2**-6


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ampcompile.optim.AdamW])
def test_a_users_wrapper_of_a_schedulers_and_a_patched_class_are_no_steps_of_torchs(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`functools.wraps` copies the scheduler's mark."""
    caplog.set_level(logging.INFO, "ampcompile")
    scaler, called = scaled(init_scale=4.0), []

    def counting(step: Any) -> Any:
        @functools.wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(step)
            return step(*args, **kwargs)

        return counted

    optimizer, patched = (kind(weights(), lr=0.1) for _ in range(2))
    CosineAnnealingLR(optimizer, 10)
    optimizer.step = counting(optimizer.step)
    for count, each in enumerate((optimizer, patched), 1):
        if each is patched:
            monkeypatch.setattr(kind, "step", counting(kind.step))
        fill(all_params(each), 0, 4.0)
        scaler.step(each)
        scaler.update(4.0)
        assert len(called) == count
    assert "its step is wrapped by" in caplog.text


# Around the step: versions, profilers, Dynamo


@pytest.mark.parametrize("scaling", [False, True])
def test_versions_tell_that_weights_were_written_and_gradients_were_not_and_profilers_see_the_step(
    scaling: bool,
) -> None:
    held, scaler = weights(), scaled()
    optimizer = (torch if scaling else ampcompile).optim.AdamW(held)
    fill(held, 0)
    before = [(param._version + 1, param.grad._version) for param in held]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        scaler.step(optimizer) if scaling else optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
    assert [(param._version, param.grad._version) for param in held] == before


def test_inside_a_compiled_function_it_runs_as_it_is_and_so_does_a_scaler() -> None:
    held, scaler = weights(), scaled(init_scale=4.0)
    optimizer, before = torch.optim.SGD(held, lr=1.0), [param.detach().clone() for param in held]
    mine, theirs = pair("AdamW")

    def train(x: torch.Tensor, other: Any) -> torch.Tensor:
        scaler.scale(sum((param * x).sum() for param in held)).backward()
        scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return step(x, other)

    def step(x: torch.Tensor, other: Any) -> torch.Tensor:
        loss = sum((param * x).square().sum() for param in all_params(other))
        loss.backward()
        other.step()
        other.zero_grad()
        return loss.detach()

    compiled = torch.compile(train, backend="eager")
    for i in range(1, 4):
        torch.testing.assert_close(compiled(torch.tensor(float(i)), mine), step(torch.tensor(float(i)), theirs))
    assert_close(held, [old - 6 for old in before])
    assert "step: fused" in str(mine)
    assert_same_weights(mine, theirs)


# Where torch takes the step


@names
@pytest.mark.parametrize("fused", [None, True])
def test_torchs_own_step_is_taken_where_the_kernels_cant_and_the_log_says_so_once(
    name: str, fused: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ampcompile")
    both = pair(name, fused=fused)
    scalers = [scaled(torch.amp.GradScaler, init_scale=16.0, growth_interval=2) for _ in both]
    for step in range(6):
        monkeypatch.setattr(native, "available", lambda *_, step=step: step in (2, 3))
        for scaler, each in zip(scalers, both, strict=True):
            fill(all_params(each), step, scaler.get_scale(), math.nan if step == 1 else None)
            scaler.step(each)
            scaler.update()
    assert_same_weights(*both)
    assert caplog.text.count(f"the step of {name} is torch's own: no C++ compiler works here") == 1


def test_sparse_gradients_and_differentiable_steps_are_torchs() -> None:
    tables = [nn.Embedding(7, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    starts = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for optim, table, start in zip((ampcompile.optim, torch.optim), tables, starts, strict=True):
        optimizer = optim.SGD(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 2])).sum().backward()
            optimizer.step()
        optimizer = optim.SGD([weight := start.clone()], lr=0.1, differentiable=True)
        weight.grad = start * 2
        optimizer.step()
        weight.sum().backward()
    assert_equal([tables[0].weight, starts[0].grad], [tables[1].weight, starts[1].grad])
    assert starts[0].grad[0] == pytest.approx(0.8)
