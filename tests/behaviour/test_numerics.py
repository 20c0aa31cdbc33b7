"""How far from float64, from Inductor under autocast, and from eager autocast, bit for bit where that is promised."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.torch_private import dispatcher
from benchmarks.models import GPT, GPTConfig
from tests.compiling import draws, error, same_bits
from tests.models import Net

SIX_LAYERS = GPTConfig(layers=6, width=32, heads=2, vocab=61, context=16)


def autocast(f: Callable[..., Any]) -> Callable[..., Any]:
    def under(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return f(*args)

    return under


def loss_and_gradients(model: nn.Module, run: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    loss = run(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, SIX_LAYERS.vocab, (2, 16)), torch.randint(0, SIX_LAYERS.vocab, (2, 16))


@pytest.mark.slow
def test_a_gpt_relaxed_is_inductor_under_autocast_and_by_default_no_further_from_float64() -> None:
    model = GPT(SIX_LAYERS)
    peer, relaxed, default = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    runs = {
        "peer": (peer, autocast(torch.compile(peer))),
        "relaxed": (relaxed, torch.compile(relaxed, backend="amp", options={"numerics": "relaxed"})),
        "default": (default, torch.compile(default, backend="amp")),
    }
    exact_model = copy.deepcopy(model).double()
    distances: dict[str, list[float]] = {name: [] for name in runs}
    for _ in draws(model, peer, relaxed, default, exact_model):
        given = batch()
        found = {name: loss_and_gradients(module, run, given) for name, (module, run) in runs.items()}
        exact = loss_and_gradients(exact_model, exact_model, given)
        assert error(found["relaxed"][1:], found["peer"][1:]) < 1e-6
        assert abs(found["relaxed"][0] - found["peer"][0]) < 1e-6 * abs(found["peer"][0])
        for name in runs:
            distances[name].append(error(found[name][1:], exact[1:]))
    assert min(distances["default"]) > 1e-4, "nothing ran in low precision"
    assert sum(distances["default"]) <= 1.05 * sum(distances["peer"])


def gated(chain: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Chains between products: `a(x) * b(x).sigmoid()` and its like."""
    parts = {"a": nn.Linear(32, 48), "b": nn.Linear(32, 48), "c": nn.Linear(48, 16)}
    return Net(lambda m, x: m.c(chain(m.a(x), m.b(x))), **parts)


CHAINS = {
    "a * sigmoid(b)": lambda a, b: a * b.sigmoid(),
    "silu(a) * b + a": lambda a, b: torch.nn.functional.silu(a) * b + a,
    "tanh(a) - b * a": lambda a, b: a.tanh() - b * a,
    "exp(a) / exp(b)": lambda a, b: a.exp() / b.exp(),
    "a user's round trip": lambda a, b: (a.float() * b.float()).to(torch.bfloat16).to(torch.float32) + a,
}


@pytest.mark.skipif(dispatcher.TORCH < (2, 13), reason="Inductor 2.11 rounds only on CUDA, whatever it is told")
def test_chains_between_products_are_eager_autocasts_bit_for_bit() -> None:
    models = {name: gated(chain) for name, chain in CHAINS.items()}

    def each(x: Tensor) -> list[Tensor]:
        return [model(x) for model in models.values()]

    compiled = torch.compile(each, backend="amp", options={"outputs": "autocast"})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(64, 32)
            for name, ours, eager in zip(models, compiled(x), autocast(each)(x), strict=True):
                assert same_bits(ours, eager) and ours.dtype == torch.bfloat16, name
