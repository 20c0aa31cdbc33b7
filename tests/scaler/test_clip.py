"""Clipping: torch's unscale_ and clip_grad_norm_ in one call, folded into the step; and clip_grad_value_, in place."""

import math
from contextlib import nullcontext, suppress
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from ampcompile.errors import OptimizerError
from ampcompile.scaler.grad_scaler import GradScaler
from tests.injecting import raised_at
from tests.pairs import pairs
from tests.scaler.cases import KINDS, assert_close, assert_equal, params, params_with, scaled


def twins(kind, sizes=(5, 7)):
    """Two optimizers on equal weights with equal gradients, scaled by 2**16."""
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    pair = [kind([nn.Parameter(p.detach().clone()) for p in params]) for _ in range(2)]
    grads = [torch.randn(size) * 2.0**16 for size in sizes]
    for optimizer in pair:
        for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            param.grad = grad.to(param.dtype, copy=True)
    return pair


@pytest.mark.parametrize(("kind", "bad"), list(zip(KINDS, [math.inf, math.nan] * 2 + [math.inf], strict=True)))
def test_an_overflow_is_found_when_clipping_and_not_looked_for_again(kind, bad):
    scaler, optimizer = scaled(), kind(params_with(1.0, bad))
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    torch.testing.assert_close(norm, torch.tensor(bad), equal_nan=True)
    for param in params(optimizer):
        param.grad.data.fill_(1.0)  # a write that leaves no trace: others are refused, see test_pending.py
    scaler.step(optimizer)
    assert scaler.last_step_skipped.item()
    assert all((param == 1).all() for param in params(optimizer))


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_it_counts_as_unscale_in_one_iteration_of_one_optimizer(name):
    scaler, (ours, other) = scaled(), twins(KINDS[1])
    clip, unscaled = getattr(scaler, name), r"unscale_\(\) has already been called "
    with pytest.raises(AssertionError, match=f"Attempted {name} but _scale is None"):
        getattr(GradScaler("cpu"), name)(ours, 1.0)
    clip(ours, 0.5)
    assert all(param.grad.abs().max() > 2.0**10 for param in params(other))
    with pytest.raises(RuntimeError, match=rf"{unscaled}.*, by {name}\(\), which"):
        scaler.unscale_(ours)
    scaler.update()
    scaler.unscale_(ours)
    clip(ours, 0.5)
    with pytest.raises(RuntimeError, match=rf"{unscaled}on .* update\(\)\.$"):
        scaler.unscale_(ours)
    scaler.step(ours)
    with pytest.raises(RuntimeError, match=rf"{name}\(\) is being called after step\(\)"):
        clip(ours, 0.5)


def test_float16_gradients_have_a_norm_in_float32():
    """torch's is float16, and infinite here."""
    param = nn.Parameter(torch.ones(4))
    param.grad_dtype = torch.float16
    param.grad = torch.full((4,), 6e4, dtype=torch.float16)
    scaler, optimizer = GradScaler("cpu", enabled=False), torch.optim.SGD([param], lr=1.0, fused=True)
    norm = scaler.clip_grad_norm_(optimizer, 2.0)
    assert norm.item() == pytest.approx(1.2e5, rel=1e-3)
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.zeros(4), atol=1e-6, rtol=0)


def clip(how, limit=0.5):
    return lambda scaler, optimizer: getattr(scaler, f"clip_grad_{how}_")(optimizer, limit)


def step_with_a_hook(scaler, optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    scaler.step(optimizer)


def own_step(scaler, optimizer):
    optimizer.step()


def broken_off(make, act, kind=KINDS[0], places=10):
    """What `make` gives, with an act broken off at each place where a signal or a failure may come."""
    for error in (KeyboardInterrupt, MemoryError):
        at, reached = 1, True
        while reached:
            scaler, ours, torchs = scaled(), *twins(kind)
            make(scaler, ours)
            reached = raised_at(at, error, lambda s=scaler, o=ours: act(s, o))
            yield scaler, ours, torchs
            at += 1
        assert at > places


def stepped(before, limit, clip=nn.utils.clip_grad_norm_):
    """The parameters of a copy of an optimizer after torch's own clipping and step."""
    optimizer = deepcopy(before)  # without gradients
    for param, other in zip(params(optimizer), params(before), strict=True):
        param.grad = other.grad.clone()
    reference = scaled(torch.amp.GradScaler)
    reference.unscale_(optimizer)
    clip(params(optimizer), limit)
    reference.step(optimizer)
    return params(optimizer)


@pytest.mark.parametrize(
    ("make", "act", "places"),
    [
        (lambda *_: None, clip("norm"), 30),
        (clip("norm"), lambda scaler, _: scaler.update(), 5),
        (clip("norm"), lambda scaler, _: scaler.update(1024.0), 5),
    ],
)
def test_after_a_clipping_or_update_that_was_broken_off_the_next_iteration_is_right(make, act, places):
    for scaler, ours, torchs in broken_off(make, act, places=places):
        with suppress(AssertionError):  # torch's, of an update for which nothing was checked, or that was done
            scaler.update()
        for param, other in zip(params(ours), params(torchs), strict=True):
            param.grad = other.grad * (scaler.get_scale() / 2.0**16)
        scaler.clip_grad_norm_(ours, 2.0)
        scaler.step(ours)
        assert_close(params(ours), stepped(torchs, 2.0))


CLIPPED, STEP = clip("norm"), GradScaler.step
BROKEN_OFF = [  # what comes before, what is broken off, what follows, and how far the step may then have clipped
    (clip("norm", 2.0), CLIPPED, STEP, (2.0, 0.5)),
    (CLIPPED, STEP, STEP, (0.5, "two steps")),  # after it, gradients are scaled for others
    (lambda *_: None, STEP, STEP, (math.inf, "two steps")),
    *(
        pytest.param(CLIPPED, step, again, (0.5, "two steps"), marks=() if again is STEP else pytest.mark.ci)
        for step in (step_with_a_hook, own_step)
        for again in (STEP, own_step)
    ),
]
IN_PLACE = [(KINDS[3], clip("norm"), nn.utils.clip_grad_norm_), (KINDS[1], clip("value"), nn.utils.clip_grad_value_)]


@pytest.mark.parametrize(("make", "act", "then", "limits"), BROKEN_OFF)
def test_what_was_broken_off_is_wholly_done_or_not_at_all(make, act, then, limits):
    """Two steps where the weights were written already. Nothing is left to the next step."""
    for scaler, ours, torchs in broken_off(make, act):
        results = [stepped(torchs, limit) for limit in limits if limit != "two steps"]
        if "two steps" in limits:
            results.append([2 * after - before for after, before in zip(results[0], params(torchs), strict=True)])
        try:
            then(scaler, ours)
        except RuntimeError as error:
            assert "step() has already been called" in str(error)
        pairs = [zip(params(ours), each, strict=True) for each in results]
        assert any(all(torch.allclose(a, b, atol=1e-6) for a, b in each) for each in pairs)
        scaler.update(2.0**16)
        for param in params(ours):
            param.grad = torch.randn_like(param) * 2.0**16
        expected = stepped(ours, math.inf)
        scaler.step(ours)
        assert_close(params(ours), expected)


@pytest.mark.parametrize(("kind", "act", "torchs_clip"), IN_PLACE)
def test_a_clipping_in_place_that_was_broken_off_is_done_again(kind, act, torchs_clip):
    for scaler, ours, torchs in broken_off(act, act, kind):
        act(scaler, ours)
        scaler.step(ours)
        assert_close(params(ours), stepped(torchs, 0.5, torchs_clip))


def test_after_a_clipping_in_place_that_was_broken_off_new_gradients_are_refused():
    for scaler, ours, _ in broken_off(lambda *_: None, CLIPPED, KINDS[3]):
        unscaled = scaler._per_optimizer_states[id(ours)]["stage"] is OptState.UNSCALED
        for param in params(ours):
            param.grad = torch.randn_like(param)
        with pytest.raises(OptimizerError, match="found new gradients at a second") if unscaled else nullcontext():
            scaler.clip_grad_norm_(ours, 0.5)


@pytest.mark.parametrize("method", ["clip_grad_norm_", "clip_grad_value_", "unscale_", "step"])
@pytest.mark.parametrize("parameters", [lambda o: iter(params(o)), params, lambda o: params(o)[0], lambda o: nn.ReLU()])
def test_parameters_in_place_of_the_optimizer(parameters, method):
    ours, _ = twins(KINDS[0])
    found = parameters(ours)
    with pytest.raises(OptimizerError, match=rf"^found '{type(found).__name__}' .*: write scaler.{method}\(optim"):
        getattr(scaled(), method)(found, *[1.0] * method.startswith("clip"))


# clip_grad_value_


@pytest.mark.parametrize(
    ("kind", "enabled", "bad", "foreach"),
    pairs(KINDS, [False, True], [None, math.inf, -math.inf, math.nan], [None, False, True]),
)
def test_clipping_by_value_has_the_bits_of_torchs(kind, enabled, bad, foreach):
    """Infinite gradients are clipped too, NaN stays; with scaling both skip that step."""
    ours, torchs = twins(kind)
    scaler, reference = (scaled(make, enabled=enabled) for make in (GradScaler, torch.amp.GradScaler))
    for step in range(2):
        for optimizer in (ours, torchs):
            for number, param in enumerate(params(optimizer)):
                param.grad = (torch.linspace(-1, 1, param.numel()) * scaler.get_scale()).to(param.dtype)
                if bad is not None and step and number:
                    param.grad[2] = bad
        assert scaler.clip_grad_value_(ours, 0.5, foreach) is None
        reference.unscale_(torchs)
        nn.utils.clip_grad_value_(params(torchs), 0.5, foreach)
        grads = [[param.grad for param in params(optimizer)] for optimizer in (ours, torchs)]
        assert_equal(*grads)
        assert any((grad.abs() == 0.5).any() for grad in grads[0])
        for each, optimizer in ((scaler, ours), (reference, torchs)):
            each.step(optimizer)
            each.update()
        assert_close(params(ours), params(torchs))
    assert scaler.get_scale() == reference.get_scale()
    assert scaler.last_step_skipped.item() == (enabled and bad is not None)
