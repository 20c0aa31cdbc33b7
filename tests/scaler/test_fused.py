"""The fused step inside a training run: checkpoints, versions, copies of weights, hooks of torch, compilation."""

import math

import pytest
import torch
from torch import nn

from ampcompile.kernels.sgd import SgdTensors
from ampcompile.scaler.fused import FusedStep, any_set, clip_over_devices
from ampcompile.scaler.pending import Gradients
from tests.scaler.cases import assert_close, fill, scaled


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 5), (5,), (2, 3, 2, 2))
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    return params


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
    for flags, expected in (([1.0], 1), ([0.0, 0.0], 0), ([1.0, 1.0], 1), ([0.0, math.nan], 1), ([1.0, -1.0], 1)):
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
    step = FusedStep(None, Gradients(list(grads.values())), work, [], {device: {} for device in devices})
    found_infs, factors, norm = step.check(torch.tensor(4.0), {devices[1]: torch.tensor(0.5)}, max_norm)
    whole = math.hypot(6, 4)  # of 24 / 4 and 32 / 4 * 0.5
    clip = min(1, 2.5 / whole) if max_norm == 2.5 else 1
    assert [found_infs[device].item() for device in devices] == [0, 0]
    assert [factors[device].item() for device in devices] == pytest.approx([clip / 4, clip / 8])
    assert norm.item() == pytest.approx(6 if max_norm is None else whole), "without a limit nobody asks for the norm"
