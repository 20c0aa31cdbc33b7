"""A small GPT trained through Inductor, beside eager autocast: the same lines on the CPU and on a GPU."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.weights.store import store
from benchmarks.models import GPT, GPTConfig
from tests.compiling import HALF, LOW, error
from tests.devices import waiting_for_nothing

pytestmark = pytest.mark.units
TINY = GPTConfig(layers=1, width=64, heads=2, vocab=128, context=32)
# What reduce-overhead adds to the default mode is CUDA graphs.
PLACES = pytest.mark.parametrize(
    "device, mode",
    [
        pytest.param("cpu", "default", marks=pytest.mark.ci),
        pytest.param("cuda", "default", marks=pytest.mark.gpu),
        pytest.param("cuda", "reduce-overhead", marks=pytest.mark.gpu),
    ],
)


def setting(device: str) -> tuple[GPT, tuple[Tensor, Tensor]]:
    tokens = torch.randint(TINY.vocab, (4, TINY.context), device=device)
    return GPT(TINY).to(device), (tokens, tokens.roll(-1, 1))


def compiled(model: nn.Module, dtype: torch.dtype, mode: str) -> Callable[..., Tensor]:
    return torch.compile(model, backend="amp", options={"dtype": dtype, "mode": mode})


def trainer(model: nn.Module, run: Any, inputs: Any, dtype: torch.dtype, ours: bool) -> Callable[[], Tensor]:
    """A training step with clipping that returns its loss, scaled in float16."""
    device = inputs[0].device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    kind = ampcompile.GradScaler if ours else torch.amp.GradScaler
    scaler: Any = kind(device, enabled=dtype is HALF, init_scale=2.0**10)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with nullcontext() if ours else torch.autocast(device, dtype):
            loss = run(*inputs)
        scaler.scale(loss).backward()
        if ours:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach().clone()  # the next replay of a CUDA graph writes over it

    return step


@PLACES
@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_it_learns_as_under_eager_autocast_and_waits_for_nothing(device: str, mode: str, dtype: torch.dtype) -> None:
    model, inputs = setting(device)
    double, other, run = copy.deepcopy(model).double(), copy.deepcopy(model), compiled(model, dtype, mode)

    def gradients(of: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        (2.0**10 * call(*inputs)).backward()
        found = [p.grad.clone() for p in of.parameters()]
        of.zero_grad()
        return found

    exact = gradients(double, double)
    limit = error(gradients(other, torch.autocast(device, dtype)(other)), exact)
    for _ in range(4):  # CUDA graphs warm up, record and replay
        assert error(gradients(model, run), exact) < 1.15 * limit
    ours = trainer(model, run, inputs, dtype, ours=True)
    theirs = trainer(other, other, inputs, dtype, ours=False)
    losses, expected = ([step().item() for _ in range(6)] for step in (ours, theirs))
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses[-1] < 0.8 * losses[0], "a copy of a weight that stayed as it was would stop the loss from falling"
    with waiting_for_nothing(device):
        more = [ours() for _ in range(3)]
    assert more[-1].item() < losses[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_copies_are_refreshed_where_they_are(mode: str) -> None:
    """CUDA graphs read addresses: a copy that moved would leave them the old weights."""
    model, (tokens, _) = setting("cuda")
    run = compiled(model, LOW, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    saved = copy.deepcopy(model.state_dict())

    def update() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 0.02
        optimizer.step()

    def overwrite() -> None:
        for parameter in model.parameters():
            parameter.data.mul_(-0.5)

    def nothing() -> None:
        """The first calls warm up and record."""

    places = []
    for write in (nothing, nothing, nothing, update, overwrite, update, lambda: model.load_state_dict(saved)):
        write()
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            found = run(tokens).clone()
            with torch.autocast("cuda", LOW):
                expected = model(tokens)
            exact = copy.deepcopy(model).double()(tokens)
        assert error([found], [exact]) < 1.15 * error([expected], [exact])
        places.append([kept.tensor.data_ptr() for kept in store.copies.values() if kept.tensor is not None])
    assert places[0] and all(places[0] == later for later in places)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_products_write_gradients_of_weights_in_float32(dtype: torch.dtype) -> None:
    """Eager autocast rounds them to 16 bits: beyond 65504 that is infinite in float16. A CPU may round, or not."""
    layer = nn.Linear(64, 48, bias=False, device="cuda")
    x = (torch.randn(4096, 64, device="cuda") + 64).to(dtype)
    compiled(layer, dtype, "default")(x).float().sum().backward()
    exact = x.double().sum(0).expand(48, 64)
    assert (exact > 65504).all() and error([layer.weight.grad], [exact]) < 1e-5
