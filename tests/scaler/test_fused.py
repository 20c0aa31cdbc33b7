"""The fused step inside a training run: checkpoints, versions, copies of weights, hooks of torch, compilation."""

import pytest
import torch
from torch import nn

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
