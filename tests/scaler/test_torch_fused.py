"""What PyTorch's own tests assert of fused optimizers under a GradScaler (test_cuda.py, test_optim.py), on ours.

The name of each test is that of PyTorch's.
"""

import math
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import DEVICES

DATA, SKIP = 4, 2


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.device(request.param):
        yield request.param


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(model(torch.ones(8, 8)), torch.arange(64.0).view(8, 8))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_params_invalidated_with_grads_invalidated_between_unscale_and_step(device, kind, options) -> None:
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    scaler = GradScaler(device, init_scale=128.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    for i, param in enumerate(model.parameters()):
        param.grad.fill_(math.inf if i % 2 else math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert all(not param.isfinite().any() for param in model.parameters())
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("separate_unscale", [True, False])
def test_grad_scaling_autocast_fused_optimizers(device: str, kind, separate_unscale: bool) -> None:
    """A fused optimizer trains as one that isn't, with the step counts of the steps that were taken."""
    control = nn.Linear(8, 8)
    model = deepcopy(control)
    optimizers = [kind(m.parameters(), lr=0.1, fused=f) for m, f in ((control, False), (model, True))]
    scalers = [GradScaler(device, init_scale=128.0) for _ in optimizers]
    for i in range(DATA):
        for side, optimizer, scaler in zip((control, model), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(side)).backward()
            if i in (0, SKIP):
                side.weight.grad.fill_(math.inf)
            if separate_unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    for c, s in zip(control.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(s, c, rtol=1e-6, atol=1e-6)
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, (c, s), strict=True)]
        for key, value in states[0].items():
            torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-7)
            assert key != "step" or value.item() == DATA - 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("grad_scale", [None, 4.0])
def test_fused_does_not_step_if_foundinf(device: str, kind, grad_scale: float | None) -> None:
    """Also with a scale that the user set on the optimizer."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(5)]
    before = [param.detach().clone() for param in params]
    optimizer = kind(params, lr=0.1, fused=True)
    for bad in (True, False):
        for param in params:
            param.grad = torch.full((1,), math.inf if bad else 8.0)
        if grad_scale is not None:
            optimizer.grad_scale = torch.tensor(grad_scale)
        scaler = GradScaler(device, init_scale=2.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        assert scaler.last_step_skipped.item() == bad
        assert all(torch.equal(p, b) == bad for p, b in zip(params, before, strict=True))
        assert all(state["step"].item() == (not bad) for state in optimizer.state.values() if "step" in state)
        scaler.update()
    if kind is torch.optim.SGD:
        assert params[0].item() == pytest.approx(1 - 0.1 * 8 / 2 / (grad_scale or 1))
