"""The fused step inside a training run: checkpoints, versions, copies of weights, hooks of torch, compilation."""

import pytest
import torch
from torch import nn

import ampcompile
from tests.scaler.cases import assert_close, fill, params, scaled


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 5), (5,), (2, 3, 2, 2))
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    return params


def test_versions_tell_that_weights_were_written_and_gradients_were_not():
    held = weights()
    optimizer = torch.optim.AdamW(held)
    fill(held, 0)
    before = [(param._version, param.grad._version) for param in held]
    scaled().step(optimizer)
    assert [(param._version - 1, param.grad._version) for param in held] == before


@pytest.mark.parametrize("scaling", [False, True])
def test_profilers_see_the_step(scaling):
    held, scaler = weights(), scaled()
    optimizer = (torch if scaling else ampcompile).optim.AdamW(held)
    fill(held, 0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        scaler.step(optimizer) if scaling else optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at the loss
def test_inside_a_compiled_function_it_runs_as_it_is_and_so_do_optimizers_of_ours():
    held, twins = weights(), [weights(1), weights(1)]
    optimizer, scaler = torch.optim.SGD(held, lr=1.0), scaled(init_scale=4.0)
    mine, theirs = (
        optim.AdamW(each, lr=0.1) for optim, each in zip((ampcompile.optim, torch.optim), twins, strict=True)
    )
    before = [param.detach().clone() for param in held]

    def train(x, other):
        loss = sum((param * x).sum() for param in held)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach(), step(x, other)

    def step(x, other):
        loss = sum((param * x).square().sum() for param in params(other))
        loss.backward()
        other.step()
        other.zero_grad()
        return loss.detach()

    compiled = torch.compile(train, backend="eager")
    for i in range(1, 4):
        found, expected = compiled(torch.tensor(float(i)), mine)[1], step(torch.tensor(float(i)), theirs)
        torch.testing.assert_close(found, expected)
    assert_close(held, [old - 6 for old in before])
    assert mine._ampcompile_step.reason is None
    assert_close(*twins)
