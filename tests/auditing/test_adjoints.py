"""What each rounding adds is its error times the derivative of what it is added to."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampcompile
from ampcompile.auditing import adjoints
from ampcompile.auditing.adjoints import Rounding
from ampcompile.auditing.records import Place
from ampcompile.auditing.result import Audit
from tests.auditing.models import Block, mean_square
from tests.auditing.test_audit import checkpointed, chosen, in_place

HALF = torch.float16


def totals(audit: Audit) -> dict[str, float]:
    sums: dict[str, float] = {}
    for rounding in audit.sensitivities().roundings:
        for result, square in rounding.squares.items():
            sums[result] = sums.get(result, 0.0) + square
    return {result: math.sqrt(square) for result, square in sums.items()}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def broken(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    torch._dynamo.graph_break()
    return torch.tanh(h) @ w


def inputs(*shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, requires_grad=True) for _ in range(2))


CALLS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[Tensor, ...]]]] = {
    "blocks": (lambda: nn.Sequential(Block(16), nn.GELU(), Block(16), nn.Linear(16, 16)), lambda: inputs(64, 16)[:1]),
    "ReLUs, which roundings flip": (
        lambda: nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU()))),
        lambda: (torch.randn(256, 64),),
    ),
    "attention": (lambda: attend, lambda: (*inputs(2, 4, 16, 8), torch.randn(2, 4, 16, 8, requires_grad=True))),
    "a graph break": (lambda: broken, lambda: inputs(16, 16)),
    "writes": (lambda: in_place, lambda: inputs(8, 8)),
    "a checkpoint": (lambda: checkpointed, lambda: inputs(8, 8)),
    "a branch": (lambda: chosen, lambda: inputs(8, 8)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", CALLS)
def test_errors_of_outputs_and_gradients_are_predicted(name: str) -> None:
    make, draw = CALLS[name]
    audit = ampcompile.audit(make(), loss=mean_square)(*draw())
    predicted = totals(audit)
    few = name in ("writes", "a checkpoint", "a branch")  # elements
    assert predicted["output 0"] == pytest.approx(audit.outputs[0], rel=0.9 if few else 0.4)
    assert predicted["gradients"] == pytest.approx(audit.gradient_error, rel=0.9 if few else 0.5)
    found = audit.sensitivities()
    assert not found.unfollowed
    assert not any("empty" in rounding.place.op for rounding in found.roundings), "memory that nobody wrote"


def test_one_rounding_adds_its_error_times_the_derivative() -> None:
    x, w = torch.randn(32, 32), torch.randn(32, 32)

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return (x.bfloat16().float() * 3 + w).sum(1)

    audit = ampcompile.audit(scaled, backward=False)(x, w)
    [rounding] = [r for r in audit.sensitivities().roundings if r.place.op == "aten._to_copy"]
    error = (x.bfloat16().double() - x.double()).square().sum().sqrt() * 3
    assert math.sqrt(rounding.squares["output 0"]) == pytest.approx(
        float(error / scaled(x, w).double().norm()), rel=1e-6
    )


def normed_by_batch() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))


def normed_by_group() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Dropout(0.5), nn.ConvTranspose2d(8, 4, 2)
    )


def with_kinks() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Hardtanh(), nn.AvgPool2d(2))


@pytest.mark.parametrize("make", [normed_by_batch, normed_by_group, with_kinks])
def test_every_op_has_a_derivative(make: Callable[[], nn.Module]) -> None:
    found = ampcompile.audit(make())(torch.randn(2, 3, 8, 8)).sensitivities()
    assert not found.unfollowed
    low = [r for r in found.roundings if r.low]
    felt = {r.place for r in low if r.squares.get("gradients", 0) or r.squares.get("output 0", 0)}
    assert felt == {r.place for r in low}, "nobody reads some results of norms"


def test_an_op_without_a_derivative_is_named() -> None:
    @torch.library.custom_op("audit_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    found = ampcompile.audit(lambda x, w: twice(x @ w), backward=False)(torch.randn(4, 4), torch.randn(4, 4))
    assert list(found.sensitivities().unfollowed) == ["audit_tests.twice"]


def test_what_overflows_adds_without_limit_and_the_rest_is_predicted_as_without_it() -> None:
    def overflowing(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * 3e4).float().mean(1) * 1e-5

    audit = ampcompile.audit(overflowing, dtype=HALF, backward=False)(torch.randn(16, 16), torch.randn(16, 16))
    assert audit.outputs == [math.inf]
    added = [(r.place.op, r.squares["output 0"]) for r in audit.sensitivities().roundings if r.squares]
    assert ("aten.mul", math.inf) in added
    [product] = [square for op, square in added if op == "aten.mm"]
    assert 0 < product < 1e-5


def test_a_rounding_goes_only_if_all_that_round_the_value_again_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    found = ampcompile.audit(model, backward=False)(torch.randn(4, 8)).sensitivities()
    products = {r.place.module: r.modules for r in found.roundings if r.place.op == "aten.addmm"}
    assert products == {"0": {"0", "2"}, "2": {"2"}, "4": {"4"}}, "a ReLU hands the rounding on, a GELU rounds itself"
    assert {r.modules for r in found.roundings if r.place.op == "aten.gelu"} == {frozenset({"2", "4"})}


def test_a_rounding_in_float32_goes_with_no_module() -> None:
    place, origins = Place("aten.mm", "a", "", False), frozenset("a")
    assert Rounding(place, False, 1, origins).modules == set() and Rounding(place, False, 1, origins).happens({"a"})
    assert Rounding(place, True, 1, origins, {"b", "c"}, is_cast=True).modules == {"b", "c"}
    assert Rounding(place, True, 1, origins, is_cast=True).modules == {"a"}
    passing = Rounding(place, True, 1, frozenset({"b"}), {"c"})
    assert [passing.happens(set(kept)) for kept in ("bc", "ac", "c", "b")] == [False, False, True, True]


def test_more_directions_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(64, 16)
    audit = ampcompile.audit(model, backward=False)(x)
    few = totals(audit)
    monkeypatch.setattr(adjoints, "PROBES", 64)
    assert totals(audit) == pytest.approx(few, rel=0.1)


def test_sensitivities_of_a_call_without_gradients() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            audit = ampcompile.audit(model)(x)
            assert totals(audit)["output 0"] == pytest.approx(audit.outputs[0], rel=0.5)
