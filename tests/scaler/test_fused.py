"""The fused step inside a training run: checkpoints, versions, copies of weights, hooks of torch, compilation."""

import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampcompile.kernels.sgd import SgdTensors
from ampcompile.scaler import fused as scaler_fused
from ampcompile.scaler.fused import FusedStep, any_set, clip_over_devices
from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.scaler.pending import Gradients
from tests.scaler.cases import assert_close, assert_equal, scaled

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "AdamW capturable off": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
}


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 5), (5,), (2, 3, 2, 2))
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    return params


def fill(params, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
        param.grad = grad * scale


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_move_both_ways(kind):
    """Steps 1 and 2 with one, 3 and 4 with the other, by a state dict."""
    results = []
    for first, second in (("ours", "torch"), ("torch", "ours"), ("torch", "torch"), ("ours", "ours")):
        params = weights()
        optimizer = KINDS[kind](params)
        for step, who in enumerate((first, first, second, second)):
            if step == 2:
                saved, params = deepcopy(optimizer.state_dict()), [nn.Parameter(p.detach().clone()) for p in params]
                optimizer = KINDS[kind](params)
                optimizer.load_state_dict(saved)
            if who == "ours":
                scaler = scaled()
                fill(params, step, 2.0**16)
                scaler.step(optimizer)
            else:
                fill(params, step)
                optimizer.step()
        results.append((params, optimizer.state_dict()))
    for params, state in results:
        assert_close(params, results[2][0])
        assert state["param_groups"] == results[2][1]["param_groups"]
        for index, expected in results[2][1]["state"].items():
            assert list(state["state"][index]) == list(expected)
            for key, value in expected.items():
                assert_close([state["state"][index][key]], [value])
                assert state["state"][index][key].stride() == value.stride()


def test_plain_sgd_gets_no_state():
    params = weights()
    optimizer = torch.optim.SGD(params, lr=0.1)
    fill(params, 0)
    scaled().step(optimizer)
    assert len(optimizer.state) == 0


def test_versions_tell_that_weights_were_written_and_gradients_were_not():
    params = weights()
    optimizer = torch.optim.AdamW(params)
    fill(params, 0)
    before = [(param._version, param.grad._version) for param in params]
    scaled().step(optimizer)
    assert [(param._version - 1, param.grad._version) for param in params] == before


def test_a_backward_that_needs_the_old_weights_raises():
    param = nn.Parameter(torch.ones(3))
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    scaled().step(torch.optim.SGD([param], lr=0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Copies:
    """Stands in for `ampcompile.weights`."""

    def __init__(self, monkeypatch, copies):
        self.copies, self.fresh = copies, []
        monkeypatch.setattr(scaler_fused, "lend", self.lend)

    def lend(self, params, known, same):
        lent = {i: self.copies[param] for i, param in enumerate(params) if self.copies[param]}
        return SimpleNamespace(tensors=lent, wrote=lambda: self.fresh.extend(params))

    def check(self):
        for param, copies in self.copies.items():
            for copy in copies:
                assert_equal([copy], [param.detach().to(copy.dtype)])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_weights_are_up_to_date_after_a_step_and_after_a_skipped_one(kind, monkeypatch):
    params = weights()
    optimizer, scaler = KINDS[kind](params), scaled()
    stale = [torch.full_like(param, torch.nan, dtype=torch.bfloat16) for param in params]
    copies = Copies(
        monkeypatch,
        {params[0]: [stale[0], stale[0].half()], params[1]: [], params[2]: [stale[2].half()]},
    )
    for seed, bad in enumerate((1.0, math.inf, 1.0)):
        fill(params, seed)
        params[0].grad[0, 0] = bad
        copies.fresh.clear()
        versions = [copy._version for param in params for copy in copies.copies[param]]
        with torch.no_grad():
            params[0].data[1, 1] = 0.3 + seed  # a write that leaves no trace, just before a step that is skipped
        scaler.step(optimizer)
        scaler.update()
        copies.check()
        assert [id(p) for p in copies.fresh] == [id(p) for p in params]
        after = [copy._version for param in params for copy in copies.copies[param]]
        assert all(new > old for new, old in zip(after, versions, strict=True))


def test_profilers_see_the_step():
    params = weights()
    fill(params, 0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        scaled().step(torch.optim.AdamW(params))
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at the loss
def test_inside_a_compiled_function_it_runs_as_it_is():
    params = weights()
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), scaled(init_scale=4.0)
    before = [param.detach().clone() for param in params]

    @torch.compile(backend="eager")
    def train(x):
        loss = sum((param * x).sum() for param in params)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    train(torch.tensor(2.0))
    assert_close(params, [old - 2 for old in before])


def test_flags_and_norms_of_several_devices_are_one():
    assert any_set([]) is None
    for flags, expected in (([0.0, 0.0], 0), ([1.0, 1.0], 1), ([0.0, math.nan], 1), ([1.0, -1.0], 1)):
        assert any_set([torch.tensor(flag) for flag in flags]).item() == expected
    norm, shrink = clip_over_devices([torch.tensor(3.0), torch.tensor(4.0)], 2.5)
    assert (norm.item(), shrink.item()) == (5.0, pytest.approx(0.5))
    assert clip_over_devices([torch.tensor(3.0)], 9.0)[1].item() == 1
    assert clip_over_devices([torch.tensor(3.0), torch.tensor(math.nan)], 9.0)[1].isnan()


@pytest.mark.parametrize("max_norm", [None, 2.5, 9.0])
def test_gradients_on_several_devices_are_unscaled_and_clipped_by_their_norm_together(max_norm):
    devices = torch.device("cpu"), torch.device("cpu", 0)  # one device under two names
    grads = {device: torch.tensor([8 * n]) for device, n in zip(devices, (3.0, 4.0), strict=True)}
    work = {device: SgdTensors([], grads=[grad]) for device, grad in grads.items()}
    step = FusedStep(None, Gradients(list(grads.values())), work, {device: {} for device in devices})
    found_infs, factors, norm = step.check(torch.tensor(4.0), {devices[1]: torch.tensor(0.5)}, max_norm)
    whole = math.hypot(6, 4)  # of 24 / 4 and 32 / 4 * 0.5
    clip = min(1, 2.5 / whole) if max_norm == 2.5 else 1
    assert [found_infs[device].item() for device in devices] == [0, 0]
    assert [factors[device].item() for device in devices] == pytest.approx([clip / 4, clip / 8])
    assert norm.item() == pytest.approx(6 if max_norm is None else whole), "without a limit nobody asks for the norm"


def test_several_groups_train_as_with_torch():
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        params = weights()
        groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "betas": (0.5, 0.7), "eps": 1e-2}]
        optimizer, scaler = torch.optim.AdamW(groups), kind("cpu")
        scaler.scale(torch.ones(()))
        for seed in range(4):
            fill(params, seed, 2.0**16)
            scaler.step(optimizer)
            scaler.update()
            optimizer.param_groups[0]["lr"] *= 0.7
        optimizer.add_param_group({"params": [extra := nn.Parameter(torch.ones(3))]})
        extra.grad = torch.ones(3)
        fill(params, 9)
        scaler.step(optimizer)
        results.append([*params, extra])
    assert_close(*results)
