"""A budget for what backward keeps holds as under Inductor: by the option, by torch's region, in the list."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config

import ampcompile
from tests.behaviour.test_late_backward import interpreted, saved_bytes
from tests.compiling import LOW
from tests.models import Attention, Block, Net

WIDTH = 32
REGION = getattr(torch.autograd.graph, "region_activation_memory_budget", None)


def linear_layers(count: int = 6) -> nn.Module:
    """Linear layers with GELU and norms."""
    return nn.Sequential(
        *(layer for _ in range(count) for layer in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    )


def transformer() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        for attention, block in zip(m.attentions, m.blocks, strict=True):
            x = block(x + attention(F.layer_norm(x, x.shape[-1:])))
        return x

    layers = {"attentions": [Attention(WIDTH) for _ in range(3)], "blocks": [Block(WIDTH) for _ in range(3)]}
    return Net(run, **{name: nn.ModuleList(parts) for name, parts in layers.items()})


MODELS: dict[str, Callable[[], nn.Module]] = {"linear layers": linear_layers, "a transformer": transformer}


def kept(f: Callable[[Tensor], Tensor], x: Tensor, given: set[int], **how: Any) -> int:
    """Bytes kept for backward, weights and copies aside."""
    torch._dynamo.reset()
    return saved_bytes(torch.compile(f, **how)(x), given)


@pytest.mark.parametrize(
    "name",
    [pytest.param("a transformer", marks=pytest.mark.ci), pytest.param("linear layers", marks=pytest.mark.slow)],
)
def test_amp_keeps_no_more_than_inductor(name: str) -> None:
    # Much larger than the weights: torch counts all inputs, copies too, as what a budget of 0 keeps.
    model, x = MODELS[name](), torch.randn(64, 64, WIDTH)
    with interpreted() as given:
        for budget in (0.5, 0.1):
            with config.patch(activation_memory_budget=budget), torch.autocast("cpu", LOW):
                theirs = kept(model, x, given)
            options = {"activation_memory_budget": budget, "products": "torch"}
            ours = kept(model, x, given, backend="amp", options=options)
            statistics = 2 * 4 * 64 * 64  # of one norm: torch's knapsack is that coarse
            assert ours <= 1.05 * theirs + statistics, (budget, ours, theirs)
            if REGION is not None:

                def within(x: Tensor, budget: float = budget) -> Tensor:
                    with REGION(budget):
                        return model(x)

                assert kept(within, x, given, backend="amp", options={"products": "torch"}) == ours
    assert config.activation_memory_budget == 1


@pytest.mark.ci
def test_the_list_shows_what_a_budget_does() -> None:
    model, x = linear_layers(3), torch.randn(4, 16, WIDTH)
    for lower in ("inductor", "aot_eager"):
        reports = [ampcompile.explain(model, lower=lower, activation_memory_budget=b)(x) for b in (None, 0.5, 0)]
        most, half, none = (report.saved_totals.backward for report in reports)
        assert most > half > none == 0
        (graph,) = reports[2].graphs
        peaks, line = dict(graph.peaks), reports[2].notes[-1]
        assert peaks[0] > peaks[0.3] and "a budget of 0: at most" in line and " only " in line
        assert line in " ".join(str(reports[2]).split())  # whose lines are as wide as the terminal
        assert "budget" not in str(reports[0].notes) and " only " not in reports[1].notes[-1]


@pytest.mark.parametrize(
    ("lower", "peak"),
    [
        # Before both gradients: the sine of what was read, its negative, and two products' results in float32.
        pytest.param("aot_eager", 4 * 4096, id="op by op"),
        # In backward, as the first gradient is written: it, what it is made of, and operands of two products.
        pytest.param("inductor", 5 * 2048, id="fused"),
    ],
)
def test_the_peak_is_counted(lower: str, peak: int) -> None:
    x, w = (torch.randn(32, 32, requires_grad=True) for _ in range(2))
    options = {"lower": lower, "products": "torch", "weights": "every_call", "activation_memory_budget": 1.0}
    (graph,) = ampcompile.explain(lambda x: (x.sin() @ w.cos()).sin(), **options)(x).graphs
    assert graph.peaks == ((1.0, peak),)


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_gradients_stay_and_no_cache_takes_one_budget_for_another(lower: str) -> None:
    """Numbers that dropout draws in forward are kept, or backward would draw others."""
    model, x = nn.Sequential(linear_layers(2), nn.Dropout(0.3), nn.Linear(WIDTH, 8)), torch.randn(4, 16, WIDTH)
    sizes, gradients = [], []
    for budget in (1.0, 0.1, 0, 1.0):
        torch._dynamo.reset()  # the graph is compiled again, or comes from a cache
        torch.manual_seed(0)
        model.zero_grad()
        result = torch.compile(model, backend="amp", options={"lower": lower, "activation_memory_budget": budget})(x)
        sizes.append(saved_bytes(result, {p.data_ptr() for p in model.parameters()}))
        result.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert sizes[0] == sizes[3] > sizes[1] >= sizes[2]
    for changed in gradients[1:]:
        for one, other in zip(gradients[0], changed, strict=True):
            assert (one - other).norm() <= 1e-2 * one.norm()
