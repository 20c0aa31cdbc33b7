"""Steps of ours quantize the weights that they write: the next call quantizes none, and no bit is another."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from tests.devices import DEVICES
from tests.weights.writers import unseen

Optimizer = torch.optim.Optimizer
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.3),  # weights outgrow their scales
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


class Model(nn.Module):
    """Two layers, of which the first is used twice, and a matrix that isn't stored row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
        self.turned = nn.Parameter((torch.randn(16, 48) / 7).t())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(self.first(x)))) @ self.turned
        return result


def compiled(model: nn.Module, **options: Any) -> Any:
    fp8 = {"policy": {"ops": {"linear": "fp8", "matmul": "fp8"}}, "products": "torch", "lower": "aot_eager"}
    return torch.compile(model, backend="amp", options=fp8 | options)


def casts() -> int:
    return ampcompile.weight_stats().casts


class Training:
    """A model, its optimizer and scaler; and the same with copies made in each call, which must train alike."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **scaling: Any) -> None:
        torch.manual_seed(0)
        self.device, self.models = device, [model := Model().to(device), copy.deepcopy(model)]
        self.calls = [
            compiled(model, dtype=dtype, weights=weights)
            for model, weights in zip(self.models, ("cached", "every_call"), strict=True)
        ]
        self.optimizers = [KINDS[kind](model.parameters()) for model in self.models]
        self.scalers = [ampcompile.GradScaler(device, init_scale=2.0**10, **scaling) for _ in self.models]

    def run(self, act: Callable[[nn.Module, Any, Any, Any], object]) -> None:
        """Do the same with both."""
        for each in zip(self.models, self.calls, self.optimizers, self.scalers, strict=True):
            act(*each)

    def step(self, x: Tensor, parts: int = 1, clip: float | None = None) -> None:
        def act(model: nn.Module, call: Any, optimizer: Any, scaler: Any) -> None:
            for part in x.to(self.device).chunk(parts):
                scaler.scale(call(part).square().mean()).backward()
            if clip is not None:
                scaler.clip_grad_norm_(optimizer, clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        self.run(act)
        assert self.equal()

    def equal(self) -> bool:
        return all(map(torch.equal, *(model.parameters() for model in self.models)))

    def settled(self) -> "Training":
        """Take the first steps, in which copies are made."""
        for _ in range(2):
            self.step(torch.randn(16, 32))
        return self


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_after_the_first_steps_no_call_quantizes(kind: str, enabled: bool, device: str) -> None:
    training = Training(kind, device=device, enabled=enabled).settled()
    before, weights = casts(), training.models[0].second.weight.detach().clone()
    for _ in range(4):
        training.step(torch.randn(32, 32), parts=2, clip=1e-3 if enabled else None)
    assert casts() == before and not torch.equal(weights, training.models[0].second.weight)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_with_skipped_steps_and_calls_without_gradients_between(device: str) -> None:
    training, found, before = Training("AdamW", torch.float16, device), list[Tensor](), 0

    def look(model: nn.Module, call: Any, optimizer: Any, scaler: Any) -> None:
        with torch.no_grad():
            found.append(call(torch.ones(16, 32, device=device)))

    for number, factor in enumerate((1.0, 1.0, 1.0, 1e4, 1.0, 1e4, 1.0)):
        training.step(torch.randn(16, 32) * factor)
        assert training.scalers[0].last_step_skipped.item() == (factor > 1)
        before = casts() if number == 2 else before
        training.run(look)
    assert casts() == before and all(map(torch.equal, found[::2], found[1::2]))


def test_a_write_between_two_steps_is_followed() -> None:
    training = Training("SGD").settled()

    def write(model: Any, *_: Any) -> None:
        with torch.no_grad():
            model.second.weight.mul_(2.0**7)

    before = casts()
    training.run(write)
    training.step(torch.randn(16, 32))
    assert casts() > before, "in the call"
    training.run(write)
    training.run(lambda model, call, optimizer, scaler: call(torch.ones(16, 32)).sum().backward())
    training.step(torch.randn(16, 32))

    def write_unseen(model: Any, *_: Any) -> None:
        unseen(model.first.weight)[3, 3] = 99.0

    training.run(lambda model, call, *_: call(torch.ones(16, 32)).sum().backward())
    training.run(write_unseen)
    training.run(lambda model, call, optimizer, scaler: (scaler.scale(torch.ones(())), scaler.step(optimizer)))
    with torch.no_grad():
        assert torch.equal(*(call(torch.ones(16, 32)) for call in training.calls)), "of a weight that was 99"


def test_two_optimizers_write_what_is_theirs() -> None:
    torch.manual_seed(0)
    models = [model := Model(), copy.deepcopy(model)]
    calls = [compiled(models[0]), compiled(models[1], weights="every_call")]
    pairs = [
        (
            torch.optim.SGD([model.first.weight, model.first.bias], lr=0.1),
            KINDS["AdamW"]([model.second.weight, model.turned]),
        )
        for model in models
    ]
    scalers = [ampcompile.GradScaler("cpu") for _ in models]
    for number in range(6):
        x = torch.randn(16, 32)
        for call, optimizers, scaler in zip(calls, pairs, scalers, strict=True):
            scaler.scale(call(x).square().mean()).backward()
            for optimizer in optimizers if number % 3 else optimizers[:1]:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        if number == 1:
            before = casts()
        assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert casts() == before


@pytest.mark.parametrize("how", ["remainder", "float32", "stochastic"])
def test_16_bit_parameters_are_quantized_as_they_are_rounded(how: Any) -> None:
    torch.manual_seed(0)
    models = [model := Model().bfloat16(), copy.deepcopy(model)]
    calls = [compiled(models[0]), compiled(models[1], weights="every_call")]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for optimizer in optimizers:
        ampcompile.keep_masters(optimizer, how)
    for number in range(5):
        x = torch.randn(16, 32, dtype=torch.bfloat16)
        for call, optimizer in zip(calls, optimizers, strict=True):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            before = casts()
        assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert casts() == before
