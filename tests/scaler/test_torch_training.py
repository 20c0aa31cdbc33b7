"""What PyTorch's own tests assert of training with a GradScaler (test_torch.py, test_cuda.py, test_optim.py), on ours.

The name of each test is that of PyTorch's.
"""

import math
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import DEVICES

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
    train: Callable[[nn.Sequential, torch.optim.Optimizer, GradScaler, list[Any], bool], GradScaler | None],
    unskipped: int,
    skipped: int,
    atol: float = 1e-6,
    compare_grads: bool = False,
) -> None:
    """Train with a scaler and without, scaling on and off: the same weights, and the scale that is due."""
    kind, options = optimizer
    for enabled in (True, False):
        control, model = twin_models()
        data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(DATA)]
        scaler = GradScaler(device, init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
        for side, is_scaled in ((control, False), (model, True)):
            result = train(side, kind(side.parameters(), lr=0.1, **options), scaler, data, is_scaled)
            scaler = result or scaler
        expected = 128.0 * 2.0**unskipped * 0.5**skipped if enabled else 1.0
        assert scaler.get_scale() == expected
        for c, s in zip(control.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(s, c, atol=atol, rtol=1e-5)
            if compare_grads:
                torch.testing.assert_close(s.grad, c.grad, atol=atol, rtol=1e-5)


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
@pytest.mark.parametrize("through_pickle", [False, True])
def test_grad_scaling_autocast(device: str, optimizer: Optimizers, through_pickle: bool) -> None:
    def train(model, optimizer, scaler, data, is_scaled):
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(model, batch)
            finish(model, optimizer, scaler, loss, i, is_scaled)
            if through_pickle:
                scaler = pickle.loads(pickle.dumps(scaler))
        return scaler

    run_both(device, optimizer, train, 3, 1, atol=1e-5)


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

    run_both(device, optimizer, train, 3, 1, atol=1e-4)


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

    run_both(device, OPTIMIZERS[0], train, 3, 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_grad_scaling_accumulation(device: str, optimizer: Optimizers) -> None:
    def train(model, optimizer, scaler, data, is_scaled):
        for i, batch in enumerate(data):
            loss = loss_of(model, batch) / 2
            (scaler.scale(loss) if is_scaled else loss).backward()
            if i % 2:
                if is_scaled:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()

    run_both(device, optimizer, train, 2, 0, atol=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_scaling_multiple(device: str, enabled: bool) -> None:
    """Two models, two optimizers, two losses; one optimizer overflows, the other unscales by itself."""
    models = [twin_models() for _ in range(2)]
    data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(DATA)]
    scaler = GradScaler(device, init_scale=128.0, growth_interval=1, enabled=enabled)
    for side, is_scaled in ((0, False), (1, True)):
        first, second = (pair[side] for pair in models)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for i, (x, y) in enumerate(data):
            for optimizer in optimizers:
                optimizer.zero_grad()
            a, b = first(x), second(x)
            losses = [nn.functional.mse_loss(0.3 * a + 0.7 * b, y), nn.functional.mse_loss(0.6 * a - 0.4 * b, y)]
            for loss in losses:
                (scaler.scale(loss) if is_scaled else loss).backward(retain_graph=True)
            if not is_scaled:
                optimizers[0].step()
                if i != SKIP or not enabled:
                    optimizers[1].step()
                continue
            if i == SKIP and enabled:
                spoil(second)
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            skipped = [scaler.step_skipped(optimizer).item() for optimizer in optimizers]
            assert skipped == [False, i == SKIP and enabled]
            scaler.update()
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    for control, model in models:
        for c, s in zip(control.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(s, c, rtol=1e-5, atol=1e-7)
