"""What PyTorch's own tests assert of training with a GradScaler (test_torch.py, test_cuda.py, test_optim.py), on ours.

The name of each test is that of PyTorch's. What they assert of accumulation, of several optimizers and of pickles,
test_differential.py compares with torch's own scaler.
"""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import DEVICES, scaled

Optimizers = tuple[type[torch.optim.Optimizer], dict[str, Any]]
OPTIMIZERS: list[Optimizers] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {"fused": True}),
]
SKIP = 2  # the iteration whose gradients overflow
DATA = 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.device(request.param):
        yield request.param


def twin_models() -> tuple[nn.Sequential, nn.Sequential]:
    control = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return control, deepcopy(control)


def run_both(
    device: str,
    optimizer: Optimizers,
    train: Callable[[nn.Sequential, torch.optim.Optimizer, GradScaler, list[Any], bool], None],
    atol: float = 1e-6,
) -> None:
    """Train with a scaler and without, scaling on and off: the same weights, and the scale after one overflow."""
    kind, options = optimizer
    for enabled in (True, False):
        control, model = twin_models()
        data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(DATA)]
        scaler = GradScaler(device, init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
        for side, is_scaled in ((control, False), (model, True)):
            train(side, kind(side.parameters(), lr=0.1, **options), scaler, data, is_scaled)
        assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
        for c, s in zip(control.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(s, c, atol=atol, rtol=1e-5)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def finish(model, optimizer, scaler, loss, i: int, is_scaled: bool) -> None:
    """Backward and step; the gradients of iteration SKIP overflow, so the control takes no step there."""
    if is_scaled:
        scaler.scale(loss).backward()
        if i == SKIP and scaler.is_enabled():
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        if i != SKIP or not scaler.is_enabled():
            optimizer.step()


def spoil(model: nn.Sequential) -> None:
    model[1].weight.grad.fill_(math.inf)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("how", ["scaled norm", "unscale_", "clip_grad_norm_", "value"])
def test_grad_scaling_clipping(device: str, optimizer: Optimizers, how: str) -> None:
    """With the scale folded into the norm, after a separate unscale_, and by our own method."""

    def train(model, optimizer, scaler, data, is_scaled):
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            (scaler.scale(loss) if is_scaled else loss).backward()
            if is_scaled and i == SKIP and scaler.is_enabled():
                spoil(model)
            params = list(model.parameters())
            if how == "value":
                torch.nn.utils.clip_grad_value_(params, 0.01 * (scaler.get_scale() if is_scaled else 1))
                if is_scaled and i == SKIP and scaler.is_enabled():
                    spoil(model)
            elif is_scaled and how == "scaled norm":
                torch.nn.utils.clip_grad_norm_(params, 0.2 * scaler.get_scale())
            elif is_scaled and how == "clip_grad_norm_":
                scaler.clip_grad_norm_(optimizer, 0.2)
            else:
                if is_scaled:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 0.2)
            if is_scaled:
                scaler.step(optimizer)
                scaler.update()
            elif i != SKIP or not scaler.is_enabled():
                optimizer.step()

    run_both(device, optimizer, train, atol=1e-4)


def test_grad_scaling_penalty(device: str) -> None:
    def train(model, optimizer, scaler, data, is_scaled):
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            scaled_loss = scaler.scale(loss) if is_scaled else loss
            grads = torch.autograd.grad(scaled_loss, model.parameters(), create_graph=True)
            inverse = 1 / scaler.get_scale() if is_scaled else 1.0
            loss = loss + torch.stack([(grad * inverse).square().sum() for grad in grads]).sum().sqrt()
            finish(model, optimizer, scaler, loss, i, is_scaled)

    run_both(device, OPTIMIZERS[0], train)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ],
)
def test_params_invalidated_with_grads_invalidated_between_unscale_and_step(device, kind, options) -> None:
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    scaler = GradScaler(device, init_scale=128.0)
    scaler.scale(loss_of(model, torch.randn(2, 8, 8))).backward()
    scaler.unscale_(optimizer)
    for i, param in enumerate(model.parameters()):
        param.grad.fill_(math.inf if i % 2 else math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert all(not param.isfinite().any() for param in model.parameters())
    assert scaler._get_growth_tracker() == 1


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
        scaler = scaled(device=device, init_scale=2.0)
        scaler.step(optimizer)
        assert scaler.last_step_skipped.item() == bad
        assert all(torch.equal(p, b) == bad for p, b in zip(params, before, strict=True))
        assert all(state["step"].item() == (not bad) for state in optimizer.state.values() if "step" in state)
        scaler.update()
    if kind is torch.optim.SGD:
        assert params[0].item() == pytest.approx(1 - 0.1 * 8 / 2 / (grad_scale or 1))
