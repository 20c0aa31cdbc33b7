"""Audits of quantized products: errors against float64, what isn't finite, and which modules `suggest` lets run so."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampcompile
from ampcompile import Policy
from ampcompile.errors import AuditError
from ampcompile.insight.audit import Audit
from ampcompile.insight.run import Session
from ampcompile.kernels import fp8
from tests.models import Block, Net

RECIPES = [*fp8.GRADIENTS]


def audited(model: Any, *args: Any, policy: Any = "op linear=fp8", **settings: Any) -> Audit:
    result: Audit = ampcompile.audit(model, policy=policy, products="torch", **settings)(*args)
    return result


def blocks() -> nn.Module:
    return nn.Sequential(Block(16), Block(16), nn.Linear(16, 32))


def made_by(audit: Audit, op: str) -> list[Any]:
    return [record for record in audit.ops if record.op == op]


def test_each_quantization_has_its_own_error_and_dtype() -> None:
    audit = audited(nn.Sequential(nn.Linear(32, 16, bias=False), nn.GELU()), torch.randn(16, 32), policy="module 0=fp8")
    assert not audit.unmeasured and not audit.not_finite and audit.first_not_finite is None
    for op in ("ampcompile.quantize", "ampcompile.quantize_weight"):
        (record,) = made_by(audit, op)
        assert record.in_dtype == "f8_e4m3fn" and record.module == "0"
        assert 0.01 < record.numbers.local < 0.04  # 3 bits behind the point: 2**-5 for the mean square at most
    (of_gradient,) = [record for record in audit.ops if record.in_dtype == "f8_e5m2"]
    assert of_gradient.backward and 0.02 < of_gradient.numbers.local < 0.08
    (product,) = made_by(audit, "ampcompile.fp8_linear")
    assert product.numbers.local < 2**-8 < 0.02 < product.numbers.cumulative < 0.06
    assert 0.02 < audit.gradients["0.weight"] < 0.12


def test_products_of_quantized_numbers_are_compared_with_their_exact_sum() -> None:
    x, weight = torch.randn(16, 32), torch.randn(32, 16)
    audit = audited(lambda x, w: x @ w, x, weight, policy="module *=fp8", backward=False)
    (record,) = made_by(audit, "ampcompile.quantize_weight")
    assert record.numbers.elements == 32 * 16
    (product,) = made_by(audit, "ampcompile.fp8_linear")
    assert product.numbers.local < 2**-8 < 0.01 < product.numbers.cumulative < 0.06


@pytest.mark.parametrize(
    ("rows", "recipe"),
    [*(pytest.param(*case, marks=pytest.mark.ci) for case in ((16, "fp8"), (7, "fp8_e4m3"))), (7, fp8.BY_ROWS)],
)
def test_the_exact_run_does_not_depend_on_the_policy(rows: int, recipe: str) -> None:
    model, x = blocks(), torch.randn(2, rows, 16)
    pairs = []
    for policy in ("default", f"module *={recipe}"):
        audit = audited(model, x, policy=policy)
        assert audit.call is not None
        pairs.append(audit.call.run(Session(local=False)))
    assert pairs[0].keys() == pairs[1].keys() and len(pairs[0]) > 10
    for name, (mixed, exact) in pairs[1].items():
        assert (exact - pairs[0][name][1]).norm() <= 1e-6 * exact.norm(), name  # the loss is of mixed results
        assert mixed.isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "where", "number"),
    [
        ("fp8", "weight", math.inf),
        ("fp8", "input", math.nan),
        (fp8.BY_ROWS, "weight", math.nan),
        (fp8.BY_ROWS, "input", -math.inf),
    ],
)
def test_numbers_that_are_not_finite_are_found_where_they_enter(recipe: str, number: float, where: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(16, 16)
    with torch.no_grad():
        (model[0].weight if where == "weight" else x)[3, 5] = number
    audit = audited(model, x, backward=False, policy=f"module *={recipe}")
    first = audit.first_not_finite
    assert first is not None and first.module == "0"
    assert first.op in ("aten._to_copy", "ampcompile.quantize_weight", "ampcompile.quantize")
    assert audit.not_finite["output 0"] >= 1 / 16


def test_what_is_suggested_is_quantized_and_meets_the_tolerance() -> None:
    model, x = blocks(), torch.randn(4, 16, 16)
    audit = audited(model, x, policy="default", backward=False)
    told: list[str] = []
    everything = audit.suggest(0.5, allow="fp8", progress=told.append)
    assert str(everything) == "module 0=fp8, module 1=fp8", "not the head"
    most = audited(model, x, policy=everything, backward=False)
    assert len(made_by(most, "ampcompile.fp8_linear")) == 4
    assert told[0].startswith("4 modules in fp8: error") and told[1] == f"4 modules in fp8: error {most.error:.2g}"
    tolerance = (audit.error + most.error) / 2
    some = audit.suggest(tolerance, allow="fp8")
    again = audited(model, x, policy=some, backward=False)
    assert again.error <= tolerance
    assert 0 < len(made_by(again, "ampcompile.fp8_linear")) < 4


def test_nothing_is_quantized_where_it_costs_too_much_trials_run_out_or_no_shape_fits() -> None:
    told: list[str] = []
    model = nn.Sequential(Block(16), nn.Linear(16, 32))
    audit = audited(model, torch.randn(16, 16), policy="default", backward=False)
    assert audit.suggest(audit.error * 1.01, allow="fp8") == audit.policy
    assert audit.suggest(0.5, 1, told.append, "fp8") == audit.policy
    assert [line.startswith("the audited policy stays") for line in told] == [False, True], "one trial is one audit"
    with pytest.raises(
        AuditError, match=r"allow=.fp4.\); expected one of .fp8., .fp8_e4m3., .fp8_rowwise., .saved., or None"
    ):
        audit.suggest(0.5, allow="fp4")
    audit = audited(nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8)), torch.randn(4, 8), policy="default")
    assert audit.suggest(0.5, allow="fp8", progress=told.append) == audit.policy
    assert told[2].startswith("0 modules in fp8")


@pytest.mark.ci
def test_what_misses_the_tolerance_in_16_bits_is_kept_first() -> None:
    model, x = blocks(), torch.randn(4, 16, 16)
    audit = audited(model, x, policy="default", backward=False)
    tolerance = audit.error / 2
    policy = audit.suggest(tolerance, allow="fp8")
    assert "fp32" in dict(policy.modules).values()
    assert audited(model, x, policy=policy, backward=False).error <= tolerance


def test_what_the_policy_says_of_modules_stays() -> None:
    given = Policy(modules=(("0.*", "bf16"), ("1.up", "fp32")))
    audit = audited(blocks(), torch.randn(4, 16, 16), policy=given)
    assert audit.suggest(0.5, allow="fp8") == Policy(modules=(("1", "fp8"), *given.modules))


def around(m: Any, x: Tensor) -> Tensor:
    """Multiplies by a weight of its own, and by one of a module inside, which rounds badly."""
    return m.inner(F.linear(x, m.weight).relu() * 1e-2) * 100 - x


def test_a_module_inside_of_one_that_is_quantized_may_be_spared() -> None:
    own = nn.Parameter(torch.randn(64, 16) / 4)
    model, x = nn.Sequential(Net(around, weight=own, inner=nn.Linear(64, 16)), nn.Linear(16, 16)), torch.randn(16, 16)
    audit = audited(model, x, policy="default")
    both = audited(model, x, policy="module 0=fp8").error
    outer = audited(model, x, policy="module 0=fp8, module 0.inner=default").error
    inner = audited(model, x, policy="module 0.inner=fp8").error
    policy = audit.suggest(max(outer, inner), allow="fp8")
    assert both > max(outer, inner)
    assert audited(model, x, policy=policy).error <= max(outer, inner)
    assert str(policy) in ("module 0=fp8, module 0.inner=default", "module 0.inner=fp8")


def tied(m: Any, tokens: Tensor) -> Tensor:
    """A language model whose loss is part of it."""
    logits = F.linear(m.block(m.embedding(tokens)), m.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_a_head_before_the_loss_and_products_outside_of_modules_are_spared() -> None:
    model = Net(tied, embedding=nn.Embedding(32, 16), block=Block(16))
    audit = audited(model, torch.randint(32, (2, 16)), policy="default")
    assert str(audit.suggest(0.9, allow="fp8")) == "module block=fp8"
    model, told = Net(lambda m, x: x + m.inner(x @ x.t()).relu(), inner=nn.Linear(16, 16)), list[str]()
    audit = audited(model, torch.randn(16, 16), policy="default")
    assert str(audit.suggest(0.5, allow="fp8", progress=told.append)) == "module inner=fp8"
    assert [line.partition(":")[0] for line in told] == ["1 module in fp8"] * 2
    assert float(told[1].split()[-1]) < float(told[0].split()[-1])


@pytest.mark.parametrize(
    ("device", "lower", "op"),
    [
        pytest.param("cuda", "inductor", "aten._scaled_mm", marks=pytest.mark.gpu),
        ("cpu", "aot_eager", "ampcompile.fp8_linear"),
    ],
)
def test_a_watch_names_the_quantized_product_that_overflows_and_changes_no_bit(
    device: str, lower: str, op: str
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(device)
    x = torch.randn(16, 16, device=device)
    found = []
    for watched in (False, True):
        torch._dynamo.reset()
        options = {"policy": "module *=fp8", "products": "torch", "dtype": torch.float16}
        options |= {"watch": watched, "lower": lower}
        compiled = torch.compile(model, backend="amp", options=options)
        result = compiled(x)
        gradients = torch.autograd.grad(result.sum(), [*model.parameters()])
        found.append([result.detach(), *gradients])
    assert all(map(torch.equal, *found))
    assert ampcompile.watch(compiled).report().first is None
    with torch.no_grad():
        model[2].weight.fill_(6e4)
        model[0].bias.fill_(4.0)
    compiled(x)
    first = ampcompile.watch(compiled).report().first
    assert first is not None
    assert (first.at.value.op, first.at.value.kind, first.at.value.module) == (op, "product", "2")


def test_explain_shows_each_quantization_when_it_runs_and_why() -> None:
    model, x = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 7)), torch.randn(16, 32)
    options: dict[str, Any] = {"policy": "op linear=fp8", "products": "torch"}
    report = ampcompile.explain(model, **options)(x)
    casts = [(cast.module, cast.of, cast.dtypes, cast.when) for cast in report.casts if cast.of != "bias"]
    assert ("0", "weight", "f32>bf16", "quantized") in casts and len(casts) == 6  # one of the result
    assert ("0", "input", "bf16>f8_e4m3fn", "every call") in casts
    assert ("0", "weight", "f32>f8_e4m3fn", "once per update") in casts
    assert ("2", "weight", "f32>bf16", "once per update") in casts
    (of_weight,) = [cast for cast in report.casts if cast.dtypes == "f32>f8_e4m3fn"]
    assert of_weight.shape == (16, 32) and of_weight.bytes == 4 * 512 + 2 * 512 + 16
    assert "power of two" in of_weight.because
    assert not [row for row in report.balance if row.stage == "amp, written in your code"]
    every_call = ampcompile.explain(model, **options, weights="every_call")(x)
    assert [cast.when for cast in every_call.casts if cast.dtypes == "f32>f8_e4m3fn"] == ["every call"]
