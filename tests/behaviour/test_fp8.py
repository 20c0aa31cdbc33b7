"""Models with fp8 in their policy: what is quantized, how often, what isn't and why, and that training goes on."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile.errors import AmpWarning
from ampcompile.kernels.fp8 import FP8_LINEAR, QUANTIZE, QUANTIZE_WEIGHT
from ampcompile.passes.decide import fp8 as decide
from tests.passes.rewriting import count, rewritten

POLICY = {"ops": {"*": "fp8"}}
FP8: dict[str, Any] = {"policy": POLICY, "products": "torch"}


class Block(nn.Module):
    """Attention's three products of one value, a matrix that isn't a layer's, and a head of an odd size."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.matrix, self.norm, self.head = nn.Parameter(torch.randn(48, 32) / 7), nn.LayerNorm(32), nn.Linear(32, 10)
        self.again = again

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.q(x) + self.k(x)) @ self.matrix

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return self.head(self.norm(hidden))


def step(model: Any, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of all parameters."""
    model.zero_grad()
    result = model(x)
    result.square().mean().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters())]


def off(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize(
    "options", [{"lower": "eager"}, {"lower": "aot_eager"}, {}, {"weights": "every_call"}], ids=str
)
def test_training_is_near_to_float64_and_further_than_16_bits(options, again):
    model = Block(again)
    exact, low = copy.deepcopy(model).double(), copy.deepcopy(model)
    x = torch.randn(2, 8, 32)
    found = step(torch.compile(model, backend="amp", options=FP8 | options), x)
    truth = step(exact, x.double())
    in_16_bits = torch.compile(low, backend="amp", options={"products": "torch", "lower": "aot_eager"})
    assert off(step(in_16_bits, x), truth) < off(found, truth) < 0.2


def test_one_value_is_quantized_once_and_weights_leave_the_graph():
    graph = rewritten(Block(), torch.randn(2, 8, 32), **FP8)[0]
    assert [count(graph, op) for op in (FP8_LINEAR, QUANTIZE, QUANTIZE_WEIGHT)] == [3, 2, 0]
    assert count(graph, torch.ops.aten.linear.default) == 1  # the head
    every_call = rewritten(Block(), torch.randn(2, 8, 32), weights="every_call", **FP8)[0]
    assert count(every_call, QUANTIZE_WEIGHT) == 3


def test_what_is_written_between_two_products_is_quantized_twice():
    def run(x: Tensor, w: Tensor) -> Tensor:
        first = x @ w
        x.mul_(2)
        return first + x @ w

    x, w = torch.randn(16, 32), torch.randn(32, 16)
    expected = x @ w + 2 * x @ w
    compiled = torch.compile(run, backend="amp", options=FP8)
    with torch.no_grad():
        assert (compiled(x, w) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_a_weight_is_quantized_once_per_update(lower):
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="amp", options={**FP8, "lower": lower})
    x = torch.randn(2, 8, 32)
    for _ in range(2):  # in the second call a copy may be in doubt, and is made again rather than compared
        compiled(x).sum().backward()
    casts = ampcompile.weight_stats().casts
    for _ in range(3):  # accumulation
        compiled(x).sum().backward()
    assert ampcompile.weight_stats().casts == casts
    optimizer.step()
    before = compiled(x).detach()
    assert ampcompile.weight_stats().casts > casts
    with torch.no_grad():
        casts = ampcompile.weight_stats().casts
        assert torch.equal(compiled(x), compiled(x)) and torch.equal(compiled(x), before)
        model.q.weight.data[0].zero_()
        assert not torch.equal(compiled(x), before)


def test_a_jump_of_the_largest_weight_is_followed():
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    compiled, x = torch.compile(model, backend="amp", options=FP8), torch.randn(16, 32)
    with torch.no_grad():
        for factor in (1.0, 2.0**20, 2.0**-40, 0.0):
            model[0].weight.mul_(factor)
            truth = F.linear(x, model[0].weight)
            assert (compiled(x) - truth).norm() <= 0.06 * truth.norm()


@pytest.mark.parametrize(
    ("grad", "lower"), [(False, "inductor"), (True, "aot_eager"), pytest.param(True, "inductor", marks=pytest.mark.ci)]
)
def test_any_number_of_rows(grad, lower):
    model = Block()
    compiled = torch.compile(model, backend="amp", dynamic=True, options={**FP8, "lower": lower})
    exact = copy.deepcopy(model).double()
    with torch.set_grad_enabled(grad):
        for rows in (1, 3, 16, 5):
            x = torch.randn(rows, 7, 32)
            if grad:
                assert off(step(compiled, x), step(exact, x.double())) < 0.2
            else:
                assert (compiled(x) - exact(x.double())).norm() < 0.1 * exact(x.double()).norm()


def test_results_are_not_finite_wherever_those_in_16_bits_are_not():
    model = Block()
    with torch.no_grad():
        model.matrix[3, 4] = torch.inf
    fp8, low = (torch.compile(copy.deepcopy(model), backend="amp", options=o) for o in (FP8, {"products": "torch"}))
    x = torch.randn(2, 8, 32)
    x[0, 2, 1] = torch.nan
    for mine, theirs in zip(step(fp8, x), step(low, x), strict=True):
        assert not (mine.isfinite() & ~theirs.isfinite()).any()


def test_explain_says_what_is_quantized_and_what_is_not_and_why():
    report = str(ampcompile.explain(Block(), **FP8)(torch.randn(2, 8, 32)))
    assert "e4m3" in report and "N = 10 is no multiple of 16" in report


def test_without_units_products_run_in_16_bits_with_one_warning():
    decide._warn_of_device.cache_clear()
    model, x = Block(), torch.randn(2, 8, 32)
    with pytest.warns(AmpWarning, match="fp8") as warned:
        graph = rewritten(model, x, policy=POLICY)[0]
    assert len([w for w in warned if "fp8" in str(w.message)]) == 1
    assert count(graph, FP8_LINEAR) == 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        mine = torch.compile(model, backend="amp", options={"policy": POLICY})(x)
        assert torch.equal(mine, torch.compile(copy.deepcopy(model), backend="amp")(x))


def test_a_module_in_fp8_quantizes_its_products_and_nothing_else():
    policy = ampcompile.Policy(modules={"q": "fp8", "norm": "fp8"})
    assert ampcompile.Policy.parse(str(policy)) == policy
    graph = rewritten(Block(), torch.randn(2, 8, 32), policy=policy, products="torch")[0]
    plain = rewritten(Block(), torch.randn(2, 8, 32), products="torch")[0]
    assert count(graph, FP8_LINEAR) == 1
    norms = [
        [n.meta["val"].dtype for n in g.graph.graph.nodes if "layer_norm" in str(n.target)] for g in (graph, plain)
    ]
    assert norms[0] == norms[1]


def test_float16_with_a_scaler_and_a_checkpoint_between():
    torch.manual_seed(3)
    model, batches = Block(), [torch.randn(2, 8, 32) for _ in range(6)]

    def train(model: nn.Module, optimizer: Any, scaler: Any, batches: list[Tensor]) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="amp", options={**FP8, "dtype": torch.float16, "lower": "aot_eager"})
        for x in batches:
            scaler.scale(compiled(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def parts(model: nn.Module) -> tuple[nn.Module, Any, Any]:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), ampcompile.GradScaler("cpu", init_scale=2.0**10)

    whole, first = parts(copy.deepcopy(model)), parts(copy.deepcopy(model))
    train(*whole, batches)
    train(*first, batches[:3])
    second = parts(copy.deepcopy(model))
    for there, here in zip(second, first, strict=True):
        there.load_state_dict(copy.deepcopy(here.state_dict()))
    train(*second, batches[3:])
    assert all(map(torch.equal, whole[0].parameters(), second[0].parameters()))
    assert not any(map(torch.equal, whole[0].parameters(), model.parameters()))


def test_masters_of_quantized_weights_are_not_released():
    model = Block().eval()
    compiled = torch.compile(model, backend="amp", options=FP8)
    with torch.no_grad():
        y = compiled(torch.randn(2, 8, 32))
        released = ampcompile.release_masters(model)
    assert y.isfinite().all() and model.q.weight.dtype == torch.float32 and model.head.weight.dtype != torch.float32
    assert "reads it in 8 bits" in str(released)
