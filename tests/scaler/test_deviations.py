"""Where our GradScaler means to differ from torch's: the points of docs/scaler.md."""

import math

import pytest
import torch
from torch import nn

from ampcompile import GradScaler
from tests.pairs import pairs
from tests.scaler.cases import KINDS, iterate, params, params_with, scaled

CPU, ALSO_CPU = torch.device("cpu"), torch.device("cpu", 0)  # two keys, one device


# What counts as an overflow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_"])
def test_gradients_that_overflow_when_unscaled_are_found(kind, how):
    scaler = scaled(init_scale=2.0**-10)
    optimizer = kind(params_with(1.0, 3e38))
    if kind in KINDS[-1:] and how == "step":
        pytest.skip("the optimizer itself unscales: torch's Adagrad divides after the check")
    if how != "step":
        getattr(scaler, how)(optimizer, *([1.0] if how == "clip_grad_norm_" else []))
    scaler.step(optimizer)
    assert scaler.last_step_skipped.item()
    assert all((param == 1).all() for param in params(optimizer))


@pytest.mark.parametrize(("kind", "scale", "separate"), pairs(KINDS[:4], [0.0, math.inf, 1e-45], [False, True]))
def test_a_scale_that_cannot_be_undone_is_an_overflow_and_recovers(kind, scale, separate):
    scaler, optimizer = scaled(), kind(params_with(1.0))
    scaler._scale.fill_(scale)  # which the constructor refuses
    if separate:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.last_step_skipped.item()
    scaler.update()
    assert 2.0**-24 <= scaler.get_scale() <= 2.0**64


def test_float64_gradients_are_checked_unscaled_too():
    param = nn.Parameter(torch.ones(2, dtype=torch.float64))
    param.grad = torch.full_like(param, 1e308)
    scaler, optimizer = scaled(init_scale=2.0**-10), torch.optim.AdamW([param])
    scaler.step(optimizer)
    assert scaler.last_step_skipped.item()


@pytest.mark.parametrize("kind", KINDS)
def test_overflows_on_two_devices_are_one_overflow(kind):
    """torch adds the flags, and its kernels take 2 for no overflow."""
    scaler, optimizer = scaled(), kind(params_with(1.0))
    scaler.unscale_(optimizer)
    flags = {CPU: torch.ones(()), ALSO_CPU: torch.ones(())}
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
    scaler.step(optimizer)
    assert scaler.last_step_skipped.item()
    assert (params(optimizer)[0] == 1).all()
    assert all(state["step"].item() == 0 for state in optimizer.state.values() if "step" in state)
    scaler.update()
    assert [flag.item() for flag in flags.values()] == [1, 1]  # torch adds into the first
    assert scaler.get_scale() == 2.0**15


# Gradients and state after a step


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_gradients_stay_scaled_and_unclipped_after_a_fused_step(kind, clips):
    scaler, optimizer = scaled(init_scale=4.0), kind(params_with(8.0))
    if clips:
        scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    (param,) = params(optimizer)
    assert (param.grad == 8).all() and not (param == 1).any()
    scaler.update()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert (param.grad == 2).all()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_without_zero_grad_old_and_new_gradients_count_alike(kind):
    """As in training without a scaler; torch's old gradients are unscaled by then, and count for nothing."""
    ours, plain = kind(params_with(None)), kind(params_with(None))
    scaler = scaled(init_scale=2.0**16)
    for value in (1.0, 3.0, -2.0):
        for optimizer, scale in ((ours, scaler.get_scale()), (plain, 1.0)):
            (params(optimizer)[0].sum() * value * scale).backward()
        scaler.step(ours)
        scaler.update()
        plain.step()
    torch.testing.assert_close(ours.param_groups[0]["params"], plain.param_groups[0]["params"])


@pytest.mark.parametrize(("first", "second"), list(zip(KINDS[:3], [*KINDS[1:3], KINDS[0]], strict=True)))
@pytest.mark.parametrize("clips", [False, True])
def test_a_parameter_of_two_optimizers_is_unscaled_and_clipped_for_each(first, second, clips):
    """torch's second step divides by the scale twice, and its second norm is that of clipped gradients."""
    ours, plain = params_with(4.0), params_with(1.0)
    scaler, optimizers = scaled(init_scale=4.0), [kind(ours) for kind in (first, second)]
    if clips:
        norms = [scaler.clip_grad_norm_(optimizer, by) for optimizer, by in zip(optimizers, (0.1, 1), strict=True)]
        assert [norm.item() for norm in norms] == [pytest.approx(3**0.5)] * 2
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for kind, by in ((first, 0.1), (second, 1)):
        plain[0].grad = torch.ones(3)
        if clips:
            nn.utils.clip_grad_norm_(plain, by)
        kind(plain).step()
    torch.testing.assert_close(ours, plain)


def test_a_skipped_first_step_leaves_zeroed_state_and_counts_for_the_scheduler():
    scaler, optimizer = scaled(), torch.optim.AdamW(params_with(math.inf), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    (state,) = optimizer.state.values()
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"] and not any(value.any() for value in state.values())
    scheduler.step()  # torch warns here, since its optimizer.step wasn't called


def test_a_fused_sgd_whose_first_step_is_skipped_starts_over():
    """torch's leaves whatever memory held as momentum."""
    optimizers = [torch.optim.SGD(params_with(1.0), lr=0.1, momentum=0.9, fused=fused) for fused in (True, False)]
    for optimizer in optimizers:
        scaler = scaled(init_scale=1.0)
        for grad in (math.inf, 1.0, 2.0):
            iterate(scaler, optimizer, grad)
    weights = [params(optimizer)[0] for optimizer in optimizers]
    torch.testing.assert_close(*weights)
    assert weights[0][0].item() == pytest.approx(1 - 0.1 * 2 - 0.1 * (0.9 * 2 + 4))  # at half the scale


# Optimizers without gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["nothing", "unscale_", "clip_grad_norm_"])
def test_an_optimizer_without_gradients_does_nothing(kind, before):
    scaler, idle = scaled(growth_interval=1), kind(params_with(None, None))
    if before != "nothing":
        assert getattr(scaler, before)(idle, *[1.0] * before.startswith("clip")) in (None, 0)
    assert GradScaler("cpu", enabled=False).clip_grad_norm_(idle, 1.0) == 0
    assert scaler.step(idle) is None
    assert not scaler.last_step_skipped.item() and not scaler.step_skipped(idle).item()
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(idle)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0**16, 0)
    assert len(idle.state) in (0, 2)
    working = torch.optim.SGD(params_with(1.0), lr=0.1)
    scaler.step(idle)
    scaler.step(working)
    scaler.update()
    assert scaler.get_scale() == 2.0**17


def test_unscaling_nothing_is_still_no_reason_to_update():
    scaler, idle = scaled(), torch.optim.SGD(params_with(None), lr=0.1)
    scaler.unscale_(idle)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


# Steps that raise


def test_a_step_that_raised_can_be_tried_again():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((getattr(self, "grad_scale", None), self.param_groups[0]["params"][0].grad[0].item()))
            if len(seen) < 3:
                raise OSError("not yet")
            return "done"

    for aware, preset in ((True, None), (True, torch.tensor(3.0)), (False, None)):
        seen = []
        scaler, optimizer = scaled(init_scale=4.0), Fails(params_with(8.0), lr=0.1)
        optimizer._step_supports_amp_scaling = aware
        if preset is not None:
            optimizer.grad_scale = preset
        for _ in range(2):
            with pytest.raises(OSError, match="not yet"):
                scaler.step(optimizer)
            assert getattr(optimizer, "grad_scale", None) is preset and not hasattr(optimizer, "found_inf")
        assert scaler.step(optimizer) == "done"
        assert not hasattr(optimizer, "grad_scale")
        expected = (4.0 * (1 if preset is None else 3), 8.0) if aware else (None, 2.0)
        assert seen == [expected] * 3
        scaler.update()
