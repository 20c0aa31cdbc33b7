"""`ampcompile.optim`: each step is that of torch's class, in any loop, and the copies of weights follow it."""

import copy
import functools
import inspect
import io
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.testing._internal.common_optimizers import optim_db

import ampcompile
from ampcompile.errors import AmpWarning, ClipError, OptimizerError
from ampcompile.kernels import native
from ampcompile.torch_private import optimizers
from tests.scaler.cases import assert_close, assert_equal, fill, params, pending, scaled

NAMES = ("SGD", "Adam", "AdamW")
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
}
names = pytest.mark.parametrize("name", NAMES)
fused = pytest.mark.parametrize("fused", [None, True])
SHAPES = ((3, 5), (7,), (), (2, 3, 4))


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def ours(name: str, held: Any = None, optim: Any = ampcompile.optim, **options: Any) -> Any:
    return getattr(optim, name)(weights() if held is None else held, **OPTIONS[name], **options)


def torchs(name: str, held: Any = None, **options: Any) -> Any:
    return ours(name, held, torch.optim, **options)


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    return ours(name, weights(dtype=dtype), **options), torchs(name, weights(dtype=dtype), **options)


def all_params(optimizer: Any) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def fill_all(step: int, *optimizers: Any) -> None:
    for each in optimizers:
        fill(all_params(each), step)


def clip(optimizer: Any, max_norm: float = 0.5) -> torch.Tensor:
    """By the method of an optimizer of ours, else by torch's function."""
    if hasattr(optimizer, "clip_grad_norm_"):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(all_params(optimizer), max_norm)


def scalers_for(pair: tuple[Any, Any], init_scale: float, ours: Any = torch.amp.GradScaler) -> list[Any]:
    """One for each, torch's."""
    return [scaled(kind, init_scale=init_scale, growth_interval=2) for kind in (ours, torch.amp.GradScaler)]


def iterate(
    step: int, pair: tuple[Any, Any], scalers: list[Any], bad: float | None = None, clips: bool = False
) -> None:
    norms = []
    for scaler, each in zip(scalers, pair, strict=True):
        scaler.scale(torch.ones(()))
        fill(all_params(each), step, scaler.get_scale(), bad)
        if clips:
            scaler.unscale_(each)
            norms.append(clip(each))
        scaler.step(each)
        scaler.update()
    if clips:
        torch.testing.assert_close(*norms, equal_nan=True)
    assert scalers[0].get_scale() == scalers[1].get_scale()


def assert_same_weights(mine: Any, theirs: Any) -> None:
    assert_close(all_params(mine), all_params(theirs))


def assert_alike(mine: Any, theirs: Any, compare: Callable[..., None] = assert_close) -> None:
    """Weights, and states as `state_dict` has them: their keys, types and devices too."""
    compare(all_params(mine), all_params(theirs))
    saved, expected = mine.state_dict(), theirs.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert list(saved["state"][number]) == list(state)
        for key, value in state.items():
            found = saved["state"][number][key]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                assert (found.dtype, found.device, found.shape) == (value.dtype, value.device, value.shape)
                (assert_equal if key == "step" else compare)([found], [value])


# What it says


def test_a_clipping_that_is_given_parameters_names_the_way_to_write_it() -> None:
    for given in (weights(), nn.Linear(2, 2).parameters(), weights()[0]):
        with pytest.raises(
            ClipError, match=r"as max_norm, expected a number: .* write optimizer.clip_grad_norm_\(1.0\)"
        ):
            ours("AdamW").clip_grad_norm_(given, 1.0)
    fill(all_params(optimizer := ours("AdamW")), 0)
    assert optimizer.clip_grad_norm_(torch.tensor(1.0)) > 1


def test_bfloat16_without_masters_is_warned_of_and_the_printed_optimizer_says_why_its_step_is_torchs() -> None:
    with pytest.warns(AmpWarning, match=r'without masters, .* rounded away. Add masters="remainder"'):
        optimizer = ours("AdamW", weights(dtype=torch.bfloat16))
    assert str(optimizer).endswith("    step: torch's own: a parameter is torch.bfloat16\n)")
    assert str(ours("AdamW", weights(dtype=torch.bfloat16), masters="remainder")).endswith("    step: fused\n)")
    late = ampcompile.optim.SGD(weights(), lr=0.1, momentum=0.9, dampening=0.1)
    fill(all_params(late), 0)
    late.step()
    assert str(late).endswith("    step: torch's own: a first step with dampening isn't like the others\n)")
    late.step()
    assert str(late).endswith("    step: fused\n)")


# As torch's class


@names
def test_the_class_is_torchs_with_three_more_arguments(name: str) -> None:
    kind, torchs_kind = getattr(ampcompile.optim, name), getattr(torch.optim, name)
    given, expected = (list(inspect.signature(each).parameters.values()) for each in (kind, torchs_kind))
    assert [p.name for p in given] == [p.name for p in expected] + ["masters", "states", "seed"]
    assert [p.default for p in given[:-3]] == [p.default for p in expected]
    assert issubclass(kind, torchs_kind) and str(ours(name)) == str(torchs(name))[:-1] + "    step: fused\n)"
    for bad in ({"lr": -1.0}, {"weight_decay": -1.0}, {"fused": True, "foreach": True}):
        messages = []
        for each in (kind, torchs_kind):
            with pytest.raises((ValueError, RuntimeError)) as error:
                each(weights(), **bad)
            messages.append(str(error.value))
        assert messages[0] == messages[1]

    class Mine(kind):  # type: ignore[misc, valid-type]
        def __init__(self, one: Any) -> None:
            super().__init__(one)

    assert list(inspect.signature(Mine).parameters) == ["one"]
    assert list(inspect.signature(ours(name).step).parameters) == ["closure"]


CONFIGURATIONS = [
    pytest.param(info, config, id=f"{info.optim_cls.__name__} {config.desc}")
    for info in optim_db
    if info.optim_cls.__name__ in NAMES
    for config in info.optim_inputs_func(device="cpu")
]


@pytest.mark.parametrize(("info", "config"), CONFIGURATIONS)
@pytest.mark.parametrize("impl", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
def test_each_configuration_of_torchs_own_tests(info: Any, config: Any, impl: dict[str, Any]) -> None:
    options = {**config.kwargs, **impl}
    name = info.optim_cls.__name__
    held = []
    for kind in (getattr(ampcompile.optim, name), info.optim_cls):
        own = copy.deepcopy(options)
        try:
            optimizer: Any = kind(weights(), **own)
        except (ValueError, RuntimeError) as error:  # a tensor for a rate, with foreach
            held.append(str(error))
            continue
        for step in range(3):
            fill_all(step, optimizer)
            optimizer.step()
        held.append(optimizer)
    if isinstance(held[1], str):
        assert held[0] == held[1]
    else:
        assert_alike(*held)


@names
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scales", [None, False, True])
def test_a_default_type_of_the_users_is_not_the_kernels(name: str, default: torch.dtype, scales: bool | None) -> None:
    """`scales`: by a scaler of ours; None without one."""
    mine, theirs = pair(name)
    scaler = None if scales is None else ampcompile.GradScaler("cpu", init_scale=4.0, enabled=scales)
    torch.set_default_dtype(default)
    try:
        for step in range(3):
            fill_all(step, mine, theirs)
            expected = clip(theirs)
            theirs.step()
            if scaler is None:
                norm = clip(mine)
                mine.step()
            else:
                for param in all_params(mine):
                    param.grad *= scaler.scale(torch.ones((), dtype=torch.float32))
                norm = scaler.clip_grad_norm_(mine, 0.5)
                scaler.step(mine)
                scaler.update()
            torch.testing.assert_close(norm, expected)
        assert_same_weights(mine, theirs)
    finally:
        torch.set_default_dtype(torch.float32)


# Scalers of torch's


@names
@fused
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_torchs_scaler_skips_grows_unscales_and_clips_as_with_torchs_class(
    name: str, fused: bool | None, clips: bool, second: bool
) -> None:
    sides = [[make(name, fused=fused), *([make("SGD", weights(1))] if second else [])] for make in (ours, torchs)]
    scalers = scalers_for(sides, 16.0)
    for step in range(8):
        for made, scaler in zip(sides, scalers, strict=True):
            scaler.scale(torch.ones(()))
            for i, optimizer in enumerate(made):
                bad = math.inf if (step, i) in ((1, 0), (3, 1), (5, 0)) else None
                fill(all_params(optimizer), step, scaler.get_scale(), bad)
                if clips:
                    scaler.unscale_(optimizer)
                    clip(optimizer)
            for optimizer in made:
                scaler.step(optimizer)
                assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, theirs in zip(*sides, strict=True):
        assert mine._ampcompile_step.reason is None
        assert_alike(mine, theirs)


def test_the_mark_belongs_to_the_instance_and_to_fused() -> None:
    for name in NAMES:
        assert not hasattr(getattr(ampcompile.optim, name), "_step_supports_amp_scaling")
        assert not hasattr(ours(name), "_step_supports_amp_scaling")
        for marked in (ours(name, fused=True), ours(name, weights(dtype=torch.bfloat16), masters="remainder")):
            for each in (marked, copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
                assert each._step_supports_amp_scaling


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampcompile.GradScaler])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_clipping_of_scaled_gradients_is_refused_and_the_next_right_step_reads_nothing_of_it(
    kind: Any, hooked: bool
) -> None:
    mine, theirs = both = pair("AdamW", fused=True)
    if hooked:
        for each in both:
            each.register_step_post_hook(lambda *_: None)
    scalers = scalers_for(both, 64.0, ours=kind)
    for each in both:
        fill(all_params(each), 0, 64.0)
    before = [p.detach().clone() for p in all_params(mine)]
    clip(mine)
    with pytest.raises(ClipError, match=r"expected them unscaled before.*Call scaler.unscale_\(optimizer\) first"):
        scalers[0].step(mine)
    assert not hasattr(mine, "grad_scale") and not hasattr(mine, "found_inf") and pending(mine) is None
    assert_equal(all_params(mine), before)
    for scaler, each in zip(scalers, both, strict=True):
        scaler.unscale_(each)
        clip(each)
        scaler.step(each)
    assert_same_weights(mine, theirs)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_clipping_whose_step_torchs_scaler_left_out_is_dropped(every: int, to_none: bool) -> None:
    """By the next clipping, or by zero_grad where a loop clips now and then: that scaler calls no step if it skips."""
    both = pair("AdamW")
    scalers = scalers_for(both, 4.0)
    for step in range(6):
        for each in both:
            if every > 1 or step % 2:
                each.zero_grad(set_to_none=to_none)
        iterate(step, both, scalers, math.inf if step in (1, 3) else None, clips=step % every == every - 1)
    assert_same_weights(*both)


def test_gradients_changed_after_the_clipping_are_refused() -> None:
    fill(params(mine := ours("SGD")), 0)
    clip(mine)
    params(mine)[0].grad.add_(1.0)
    with pytest.raises(ClipError, match=r"Clip again after the last change .*With a scaler, call update"):
        mine.step()
    clip(mine)
    mine.step()


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
@pytest.mark.parametrize("kernels", [True, False])
def test_hooks_run_once_whoever_takes_the_step(
    name: str, another: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "available", lambda *_: kernels)
    if another == "before":
        torchs(name)
    mine, seen = ours(name), []
    if another == "after":
        torchs(name)
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
        wrapper.clip_grad_norm_(0.5)
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
        assert wrapper._ampcompile_step is mine._ampcompile_step and wrapper.step() is None
    assert_same_weights(mine, theirs)


class Doubling(ampcompile.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for param in all_params(self):
            param.grad.mul_(2.0)
        return super().step(closure)


def test_a_subclass_with_a_step_of_its_own_gets_gradients_that_are_clipped() -> None:
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


class Plain(ampcompile.optim.AdamW):
    """A subclass without a step of its own."""


@pytest.mark.parametrize("scaler", [ampcompile.GradScaler, torch.amp.GradScaler])
def test_a_subclass_without_a_step_of_its_own_is_one_of_ours(scaler: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampcompile")
    both = type("Later", (Plain,), {})(weights(), lr=0.1), ours("AdamW")
    scalers = [scaled(scaler, init_scale=4.0) for _ in both]
    for step in range(4):
        for optimizer, its in zip(both, scalers, strict=True):
            its.scale(torch.ones(()))
            fill(all_params(optimizer), step, its.get_scale(), math.inf if step == 2 else None)
            if step == 1:
                its.unscale_(optimizer)
                clip(optimizer)
            its.step(optimizer)
            its.update()
        assert_equal(*([param.grad for param in all_params(optimizer)] for optimizer in both))
    assert_equal(*map(all_params, both))
    assert optimizers.writes_only_parameters(both[0]) and not caplog.text


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

    optimizer = kind(weights(), lr=0.1)
    CosineAnnealingLR(optimizer, 10)
    optimizer.step = counting(optimizer.step)
    patched = kind(weights(), lr=0.1)
    monkeypatch.setattr(kind, "step", counting(kind.step))
    other = kind(weights(), lr=0.1)
    monkeypatch.setattr(kind, "step", torch.optim.SGD.step)
    kind(weights(), lr=0.1)
    for count, each in enumerate((optimizer, patched, other), 1):
        if each is not optimizer:
            monkeypatch.setattr(kind, "step", counting(torch.optim.AdamW.__mro__[1].step))
        fill(all_params(each), 0, 4.0)
        scaler.step(each)
        scaler.update(4.0)
        assert len(called) == count
    assert "its step is wrapped by" in caplog.text


# Where torch takes the step


@names
@fused
def test_torchs_own_step_is_taken_where_the_kernels_cant_and_the_log_says_so_once(
    name: str, fused: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ampcompile")
    both = pair(name, fused=fused)
    scalers = scalers_for(both, 16.0)
    for step in range(6):
        monkeypatch.setattr(native, "available", lambda *_, step=step: step in (2, 3))
        iterate(step, both, scalers, math.nan if step == 1 else None)
    assert_same_weights(*both)
    assert caplog.text.count(f"the step of {name} is torch's own: no C++ compiler works here") == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own, before 2.13
def test_sparse_gradients_float64_and_differentiable_steps_are_torchs() -> None:
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

    mine, theirs = pair("AdamW", torch.float64)
    for step in range(3):
        fill_all(step, mine, theirs)
        mine.step()
        theirs.step()
    assert_alike(mine, theirs, assert_equal)


# Masters


@names
@pytest.mark.parametrize("how", ["remainder", "float32", "stochastic"])
def test_masters_are_those_of_keep_masters_and_survive_copies(name: str, how: str) -> None:
    mine = ours(name, weights(dtype=torch.bfloat16), masters=how, seed=5)
    theirs = torchs(name, weights(dtype=torch.bfloat16))
    ampcompile.keep_masters(theirs, how, seed=5)
    scalers = scalers_for((mine, theirs), 8.0)
    for step in range(6):
        iterate(step, (mine, theirs), scalers, math.inf if step == 4 else None)
        if step == 1:
            mine = pickle.loads(pickle.dumps(mine))
        if step == 2:
            mine = copy.deepcopy(mine)
        if step == 3:
            file = io.BytesIO()
            torch.save(mine.state_dict(), file)
            file.seek(0)
            mine.load_state_dict(torch.load(file, weights_only=True))
    assert_alike(mine, theirs, assert_equal)


@pytest.mark.filterwarnings("ignore:found bfloat16 parameters")
def test_masters_that_cant_be_are_refused_as_by_keep_masters() -> None:
    with pytest.raises(OptimizerError, match="found no 16-bit parameter"):
        ours("AdamW", masters="remainder")
    with pytest.raises(OptimizerError, match="found how='half'"):
        ours("AdamW", masters="half")
    with pytest.raises(OptimizerError, match="expected an integer of 64 bits"):
        ours("AdamW", weights(dtype=torch.bfloat16), masters="stochastic", seed=None)
    with pytest.raises(OptimizerError, match=r"those of ampcompile.optim take masters="):
        ampcompile.keep_masters(ours("AdamW", weights(dtype=torch.bfloat16)))
