"""What PyTorch's own tests assert of training with a GradScaler (test_torch.py, test_cuda.py, test_optim.py), on ours.

The name of each test is that of PyTorch's. What they assert of accumulation, of several optimizers, of pickles and of
unscaling before a clipping, test_differential.py compares with torch's own scaler.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import DEVICES, scaled

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
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


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.parametrize("kind,options", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("enabled", [True, False])
def test_grad_scaling_clipping(device: str, kind, options: dict[str, Any], how: str, enabled: bool) -> None:
    """Of gradients that stay scaled, by a norm or a value that is: weights as without a scaler, and the scale due."""
    if kind is torch.optim.Adagrad and options.get("fused") and device == "cuda":
        pytest.skip("torch: no fused Adagrad for CUDA")
    control = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = deepcopy(control)
    data = [torch.randn(2, 8, 8) for _ in range(DATA)]
    scaler = GradScaler(device, init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
    for side in (control, model):
        optimizer, is_scaled = kind(side.parameters(), lr=0.1, **options), side is model
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            loss = loss_of(side, *batch)
            (scaler.scale(loss) if is_scaled else loss).backward()
            scale = scaler.get_scale() if is_scaled else 1.0
            if how == "norm":
                torch.nn.utils.clip_grad_norm_(side.parameters(), 0.2 * scale)
            else:
                torch.nn.utils.clip_grad_value_(side.parameters(), 0.01 * scale)
            if is_scaled and i == SKIP and enabled:
                side[1].weight.grad.fill_(math.inf)
            if is_scaled:
                scaler.step(optimizer)
                scaler.update()
            elif i != SKIP or not enabled:
                optimizer.step()
    assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
    for c, s in zip(control.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(s, c, atol=1e-4, rtol=1e-5)


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
    scaler.scale(loss_of(model, *torch.randn(2, 8, 8))).backward()
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
    if kind is torch.optim.Adagrad and device == "cuda":
        pytest.skip("torch: no fused Adagrad for CUDA")
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
