"""Clipping: torch's unscale_ and clip_grad_norm_ in one call, folded into the step; and clip_grad_value_, in place."""

import math
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from ampcompile.errors import OptimizerError
from ampcompile.optim.keep_masters import keep_masters
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


def of_16_bits(params, how):
    optimizer = torch.optim.AdamW([nn.Parameter(param.detach().bfloat16()) for param in params], fused=True)
    keep_masters(optimizer, how)
    return optimizer


MASTERS = [partial(of_16_bits, how=how) for how in ("remainder", "float32", "stochastic")]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enabled", [False, True])
def test_without_gradients_the_norm_is_zero(kind, enabled):
    scaler, optimizer = scaled(enabled=enabled), kind(params_with(None))
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0
    scaler.step(optimizer)
    scaler.update()


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


CLIP = lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.5)  # noqa: E731


def broken_off(make, act=CLIP, kind=KINDS[0], places=30):
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
        (lambda *_: None, CLIP, 30),
        (CLIP, lambda scaler, _: scaler.update(), 5),
        (CLIP, lambda scaler, _: scaler.update(1024.0), 5),
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


def test_a_second_clipping_that_was_broken_off_is_wholly_done_or_not_at_all():
    for scaler, ours, torchs in broken_off(lambda scaler, ours: scaler.clip_grad_norm_(ours, 2.0)):
        once, twice = (stepped(torchs, norm) for norm in (2.0, 0.5))
        scaler.step(ours)
        pairs = [zip(params(ours), each, strict=True) for each in (once, twice)]
        assert any(all(torch.allclose(a, b, atol=1e-6) for a, b in each) for each in pairs)


STEPS = {
    "the scaler's": lambda scaler, optimizer: scaler.step(optimizer),
    "the scaler's, of an optimizer with a hook": lambda scaler, optimizer: (
        optimizer.register_step_post_hook(lambda *_: None),
        scaler.step(optimizer),
    ),
    "the optimizer's own": lambda scaler, optimizer: optimizer.step(),
}


@pytest.mark.parametrize(
    ("step", "again"),
    [
        ("the scaler's", "the scaler's"),  # after it, gradients are scaled for others
        *((step, again) for step in list(STEPS)[1:] for again in ("the scaler's", "the optimizer's own")),
    ],
)
def test_a_step_that_was_broken_off_is_taken_again(step, again):
    for scaler, ours, torchs in broken_off(CLIP, STEPS[step], places=10):
        once = stepped(torchs, 0.5)
        twice = [2 * after - before for after, before in zip(once, params(torchs), strict=True)]
        try:
            STEPS[again](scaler, ours)
        except RuntimeError as error:
            assert "step() has already been called" in str(error)
        pairs = [zip(params(ours), each, strict=True) for each in (once, twice)]
        assert any(all(torch.allclose(a, b, atol=1e-6) for a, b in each) for each in pairs), (
            "broken off before the weights were written, or after"
        )


@pytest.mark.parametrize(("name", "kind"), [("clip_grad_norm_", KINDS[3]), ("clip_grad_value_", KINDS[1])])
def test_a_clipping_in_place_that_was_broken_off_is_done_again(name, kind):
    def clip(scaler, optimizer):
        getattr(scaler, name)(optimizer, 0.5)

    for scaler, ours, torchs in broken_off(clip, clip, kind, places=10):
        clip(scaler, ours)
        scaler.step(ours)
        assert_close(params(ours), stepped(torchs, 0.5, getattr(nn.utils, name)))


def test_after_a_clipping_in_place_that_was_broken_off_new_gradients_are_refused():
    for scaler, ours, _ in broken_off(lambda *_: None, kind=KINDS[3], places=10):
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
    pairs([*KINDS, *MASTERS], [False, True], [None, math.inf, -math.inf, math.nan], [None, False, True]),
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
        (assert_close if kind in KINDS else assert_equal)(params(ours), params(torchs))
    assert scaler.get_scale() == reference.get_scale()
    assert scaler.last_step_skipped.item() == (enabled and bad is not None)
