"""What our GradScaler adds to torch's: bounds, a warning, flags, and fused steps without scaling."""

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.errors import AmpWarning, OptimizerError
from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import KINDS, assert_equal, iterate, params, params_with, scaled

# Bounds of the scale


def test_the_scale_stays_within_its_bounds_which_are_pickled_and_stay_out_of_the_state_dict():
    keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    for bounds in ({}, {"min_scale": 4.0, "max_scale": 16.0}):
        low, high = bounds.values() or (2.0**-24, 2.0**64)
        given, optimizer = scaled(init_scale=2 * low, growth_interval=1, **bounds), torch.optim.SGD(params_with(1.0))
        assert set(given.state_dict()) == keys
        for scaler in (given, pickle.loads(pickle.dumps(given)), copy.deepcopy(given)):
            scaler.scale(torch.ones(()))
            for _ in range(4):
                iterate(scaler, optimizer, math.inf)
            assert scaler.get_scale() == low
            scaler.update(high / 2)
            for _ in range(4):
                iterate(scaler, optimizer, 1.0)
            assert scaler.get_scale() == high


@pytest.mark.parametrize(("given", "kept"), [(0.0, 4.0), (1e30, 16.0), (math.inf, 16.0), (8.0, 8.0)])
def test_scales_that_are_given_or_loaded_are_kept_within_the_bounds(given, kept):
    for value in (given, torch.tensor(given)):
        scaler = scaled(min_scale=4.0, max_scale=16.0)
        scaler.update(value)
        assert scaler.get_scale() == kept
    state = {**scaler.state_dict(), "scale": given}
    scaler.load_state_dict(state)
    early = GradScaler("cpu", min_scale=4.0, max_scale=16.0)
    early.load_state_dict(state)
    assert scaler.get_scale() == early.get_scale() == early.scale(torch.ones(())).item() == kept
    with pytest.raises(KeyError):
        scaler.load_state_dict({"scale": given})
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        scaler.load_state_dict({})
    assert scaler.get_scale() == kept


@pytest.mark.parametrize("enabled", [True, False])
def test_the_state_of_torchs_own_scaler_gets_the_default_bounds(enabled):
    state = torch.amp.GradScaler("cpu", init_scale=2.0**-24, enabled=enabled).__getstate__()
    scaler = GradScaler.__new__(GradScaler)
    scaler.__setstate__(state)
    scaler.scale(torch.ones(()))
    iterate(scaler, torch.optim.SGD(params_with(1.0), lr=0.1), math.inf if enabled else 1.0)
    assert scaler.get_scale() == (2.0**-24 if enabled else 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_error", [False, True])
def test_two_hundred_overflows_then_a_good_step(kind, is_error):
    """torch's scale is 0 by then, and the good step makes every weight NaN. Good steps in between prevent the warning;
    one that is an error leaves the iteration ended.
    """
    scaler, optimizer, expected = scaled(), kind(params_with(1.0, 2.0)), r"gradients in \d+ updates in a row"
    for i in range(200):
        iterate(scaler, optimizer, math.inf if i % 99 else 0.0)
    with pytest.raises(AmpWarning, match=expected) if is_error else pytest.warns(AmpWarning, match=expected) as caught:
        for _ in range(200):
            iterate(scaler, optimizer, math.inf)
    assert is_error or (len(caught) == 1 and caught[0].filename == iterate.__code__.co_filename)
    before = [param.clone() for param in params(optimizer)]
    iterate(scaler, optimizer, scaler.get_scale())
    assert scaler.get_scale() > 0 and not scaler.last_step_skipped.item()
    for param, old in zip(params(optimizer), before, strict=True):
        assert param.isfinite().all() and (param < old).all()


@pytest.mark.parametrize("then", ["unscale_", "step", "clip_grad_norm_"])
def test_an_optimizer_with_the_id_of_one_that_is_gone_is_a_new_one(then):
    scaler, old, new = scaled(init_scale=4.0), *(torch.optim.SGD(params_with(4.0), lr=1.0) for _ in range(2))
    scaler.unscale_(old)
    states = scaler._per_optimizer_states
    states[id(new)] = states.pop(id(old))  # as if it had been made at the same address
    del old
    gc.collect()
    scaler.clip_grad_norm_(new, 9.0) if then == "clip_grad_norm_" else getattr(scaler, then)(new)
    scaler.step(new) if then != "step" else None
    assert torch.equal(params(new)[0], torch.zeros_like(params(new)[0]))


# Flags


def test_flags_tell_whether_steps_were_skipped():
    scaler = scaled()
    good, bad = torch.optim.AdamW(params_with(1.0)), torch.optim.RMSprop(params_with(math.nan))
    with pytest.raises(OptimizerError, match="found no step so far, expected one: ask after"):
        _ = scaler.last_step_skipped
    scaler.step(good)
    with pytest.raises(OptimizerError, match="found no step so far"):
        scaler.step_skipped(bad)
    kept = scaler.last_step_skipped
    scaler.step(bad)
    assert kept.dtype == torch.bool and kept.shape == ()
    flags = [kept, scaler.last_step_skipped, scaler.step_skipped(good), scaler.step_skipped(bad)]
    assert [flag.item() for flag in flags] == [False, True, False, True]
    scaler.update()
    assert scaler.last_step_skipped.item() and not scaler.step_skipped(good).item()
    iterate(scaler, good, math.inf)
    assert not kept.item() and scaler.step_skipped(good).item()


def test_nothing_is_kept_of_an_optimizer_that_is_gone():
    scaler, optimizer = scaled(), torch.optim.AdamW(params_with(1.0))
    scaler.step(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_optimizers_that_go_while_all_are_asked():
    """As soon as one is asked for a clipping, as a collector may free them at any time."""
    others, asking = [torch.optim.SGD(params_with(1.0)) for _ in range(3)], []

    class Collecting(torch.optim.RMSprop):
        def __getattr__(self, name):
            others[: len(others) * len(asking)] = []
            raise AttributeError(name)

    scaler, collecting = scaled(), Collecting(params_with(1.0))
    for optimizer in (collecting, *others):
        scaler.step(optimizer)
    del optimizer
    asking.append("update")
    scaler.update()
    assert not others


class Duck:
    """An optimizer that can be neither hashed nor referred to weakly."""

    __slots__ = ("param_groups",)
    __hash__ = None

    def __init__(self):
        self.param_groups = [{"params": params_with(1.0)}]

    def step(self):
        with torch.no_grad():
            self.param_groups[0]["params"][0].sub_(self.param_groups[0]["params"][0].grad)


def test_an_optimizer_that_can_be_neither_hashed_nor_referred_to_weakly_is_stepped_and_skipped():
    scaler, duck = scaled(), Duck()
    iterate(scaler, duck, scaler.get_scale())
    iterate(scaler, duck, math.inf)
    assert scaler.step_skipped(duck).item() and torch.equal(params(duck)[0], torch.zeros(3))


# Switched off


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_disabled_scaler_has_no_settings_and_hands_a_closure_to_the_optimizer(as_keyword):
    scaler, optimizer = GradScaler("cpu", enabled=False), torch.optim.SGD(params_with(1.0), lr=0.1)
    result = scaler.step(optimizer, closure=lambda: 5.0) if as_keyword else scaler.step(optimizer, lambda: 5.0)
    assert result == 5.0 and (params(optimizer)[0] < 1).all()
    for each in (scaler, pickle.loads(pickle.dumps(scaler))):
        assert each.state_dict() == {} and each.get_scale() == 1.0 and not each.is_enabled()
        with pytest.raises(AttributeError, match="'GradScaler' object has no attribute '_growth_factor'"):
            each.get_growth_factor()


def test_without_cuda_it_is_disabled_as_torchs_is():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling."):
        assert not GradScaler().is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler(enabled=False)


def test_nonsense_is_refused_unless_nothing_is_scaled() -> None:
    with pytest.raises(OptimizerError, match="found device 'gpu'; expected a type of devices that torch knows"):
        GradScaler("gpu")
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptimizerError, match=f"found init_scale={scale!r}; expected a number above 0"):
            GradScaler("cpu", init_scale=scale)
    for low, high in ((2.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(OptimizerError, match="expected 0 <= min_scale <= max_scale: swap them"):
            GradScaler("cpu", min_scale=low, max_scale=high)
    assert not GradScaler("cpu", init_scale=0, enabled=False).is_enabled()
    for init, begins in ((2.0**70, 2.0**64), (2.0**-40, 2.0**-24)):
        with pytest.warns(AmpWarning, match=r"expected one from min_scale=.* begins at the bound"):
            assert scaled(init_scale=init).get_scale() == begins


@pytest.mark.parametrize("how", [None, "remainder", "stochastic"])
def test_a_default_device_of_the_users_is_not_ours(how: str | None) -> None:
    results = []
    for device in ("cpu", "meta"):
        held = [nn.Parameter(torch.linspace(-1, 1, n).to(torch.bfloat16 if how else torch.float32)) for n in (100, 7)]
        optimizer, scaler = ampcompile.optim.AdamW(held, lr=0.1, masters=how), scaled(growth_interval=2)
        for step in range(3):
            for param in held:
                param.grad = param.detach() * (step + 1)
            with torch.device(device):
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
        results.append([*held, torch.tensor(scaler.get_scale())])
    assert_equal(*results)
