"""Steps of ours quantize the weights that they write: the next call quantizes none, and no bit is another."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.kernels.fp8 import GRADIENTS
from tests.devices import DEVICES
from tests.pairs import pairs
from tests.weights.writers import unseen

KINDS: dict[str, Callable[[Any], Any]] = {
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


def casts() -> int:
    return ampcompile.weight_stats().casts


class Twins:
    """A model with its optimizers and scaler; and the same with copies made in each call, which must train alike."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Callable[[Any], list[Any]],
        scaler: Any,
        recipe: str = "fp8",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.models, self.scalers = [model, copy.deepcopy(model)], [scaler, copy.deepcopy(scaler)]
        policy = {"ops": {"linear": recipe, "matmul": recipe}}
        options: dict[str, Any] = {"policy": policy, "dtype": dtype, "products": "torch", "lower": "aot_eager"}
        self.calls = [
            torch.compile(model, backend="amp", options={**options, "weights": weights})
            for model, weights in zip(self.models, ("cached", "every_call"), strict=True)
        ]
        self.optimizers = [optimizers(model) for model in self.models]

    def run(self, act: Callable[[Any, Any, Any, Any], object]) -> None:
        """Do the same with both."""
        for each in zip(self.models, self.calls, self.optimizers, self.scalers, strict=True):
            act(*each)

    def step(
        self, rows: int = 16, factor: float = 1.0, parts: int = 1, clip: float | None = None, count: int = 1
    ) -> None:
        """A step of the first `count` optimizers, on random rows."""
        x = factor * torch.randn(rows, 32).to(self.models[0].turned)

        def act(model: nn.Module, call: Any, optimizers: Any, scaler: Any) -> None:
            for part in x.chunk(parts):
                scaler.scale(call(part).square().mean()).backward()
            for optimizer in optimizers[:count]:
                if clip is not None:
                    scaler.clip_grad_norm_(optimizer, clip)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()

        self.run(act)
        assert all(map(torch.equal, *(model.parameters() for model in self.models)))


def twins(kind: str, device: str = "cpu", enabled: bool = True, **options: Any) -> Twins:
    scaler = ampcompile.GradScaler(device, init_scale=2.0**10, enabled=enabled)
    return Twins(Model().to(device), lambda model: [KINDS[kind](model.parameters())], scaler, **options)


OFTEN = [("SGD", True, "fp8"), ("AdamW", False, "fp8_e4m3"), ("AdamW fused", True, "fp8_rowwise")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "enabled", "recipe"),
    [
        *OFTEN,
        *(
            pytest.param(*c, marks=pytest.mark.ci)
            for c in pairs([*KINDS], [True, False], [*GRADIENTS])
            if c not in OFTEN
        ),
    ],
)
def test_after_the_first_steps_no_call_quantizes(kind: str, enabled: bool, recipe: str, device: str) -> None:
    training = twins(kind, device, enabled, recipe=recipe)
    for _ in range(2):
        training.step()
    before, weights = casts(), training.models[0].second.weight.detach().clone()
    for _ in range(4):
        training.step(rows=32, parts=2, clip=1e-3 if enabled else None)
    assert casts() == before and not torch.equal(weights, training.models[0].second.weight)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_with_skipped_steps_and_calls_without_gradients_between(device: str) -> None:
    training, found, before = twins("AdamW", device, dtype=torch.float16), list[Tensor](), 0

    def look(model: nn.Module, call: Any, optimizers: Any, scaler: Any) -> None:
        with torch.no_grad():
            found.append(call(torch.ones(16, 32, device=device)))

    for number, factor in enumerate((1.0, 1.0, 1.0, 1e4, 1.0, 1e4, 1.0)):
        training.step(factor=factor)
        assert training.scalers[0].last_step_skipped.item() == (factor > 1)
        before = casts() if number == 2 else before
        training.run(look)
    assert casts() == before and all(map(torch.equal, found[::2], found[1::2]))


def test_a_write_between_two_steps_is_followed() -> None:
    training, x = twins("SGD"), torch.ones(16, 32)
    for _ in range(2):
        training.step()

    def write(model: Any, *_: Any) -> None:
        with torch.no_grad():
            model.second.weight.mul_(2.0**7)

    def write_unseen(model: Any, *_: Any) -> None:
        unseen(model.first.weight)[3, 3] = 99.0

    def accumulate(model: Any, call: Any, *_: Any) -> None:
        call(x).sum().backward()

    def step_alone(model: Any, call: Any, optimizers: Any, scaler: Any) -> None:
        scaler.scale(torch.ones(()))
        scaler.step(optimizers[0])

    before = casts()
    training.run(write)
    training.step()
    assert casts() > before, "in the call"
    training.run(write)
    training.run(accumulate)
    training.step()
    for act in (accumulate, write_unseen, step_alone):
        training.run(act)
    with torch.no_grad():
        assert torch.equal(*(call(x) for call in training.calls)), "of a weight that was 99"


def test_two_optimizers_write_what_is_theirs() -> None:
    def optimizers(model: Any) -> list[Any]:
        first = torch.optim.SGD([model.first.weight, model.first.bias], lr=0.1)
        return [first, KINDS["AdamW"]([model.second.weight, model.turned])]

    training = Twins(Model(), optimizers, ampcompile.GradScaler("cpu"))
    for number in range(6):
        training.step(count=2 if number % 3 else 1)
        if number == 1:
            before = casts()
    assert casts() == before


@pytest.mark.parametrize(
    "how", ["remainder", *(pytest.param(how, marks=pytest.mark.ci) for how in ("float32", "stochastic"))]
)
def test_16_bit_parameters_are_quantized_as_they_are_rounded(how: Any) -> None:
    def optimizers(model: Any) -> list[Any]:
        ampcompile.keep_masters(optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2), how)
        return [optimizer]

    training = Twins(Model().bfloat16(), optimizers, torch.amp.GradScaler("cpu", enabled=False))  # by optimizers alone
    for number in range(5):
        training.step()
        if number == 1:
            before = casts()
    assert casts() == before
