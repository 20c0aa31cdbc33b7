"""The audit tells how wrong a mixed run is and where, and leaves everything else as it was."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile.errors import AuditError, OptionError
from tests.compiling import amp, error, gradients
from tests.insight import models
from tests.insight.models import mean_square, planted
from tests.models import Block, Net

# Dynamo asks every tensor that crosses a graph break for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

HALF = torch.float16


def exact_errors(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Errors of output and gradients of the amp-compiled model against a copy of it in float64."""
    twin = copy.deepcopy(model).double()
    exact = twin(x.double())
    compiled, _ = amp(model)
    found = compiled(x)
    ours = gradients(model, lambda _: mean_square(found))
    return error([found], [exact]), error(ours, gradients(twin, lambda _: mean_square(exact)))


def test_a_planted_overflow_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = ampcompile.audit(planted(6e4), dtype=HALF)(torch.randn(4, 8))
    first = audit.first_overflow
    assert first is not None and (first.op, first.module, first.backward) == ("aten.mul", "1.1", False)
    assert first.source.startswith(models.__file__)
    overflowed = [module for module, numbers in audit.modules.items() if numbers.overflowed]
    assert overflowed[0] == "1.1" and "0" not in overflowed
    assert audit.error == float("inf")
    in_float32_too = ampcompile.audit(planted(3e30), dtype=torch.bfloat16, backward=False)(torch.randn(4, 8))
    assert in_float32_too.first_overflow is None
    monkeypatch.setenv("COLUMNS", "100")
    table = str(audit)
    assert max(map(len, table.splitlines())) <= 100
    assert "first overflow: aten.mul in 1.1, models.py:" in table and "infinite" in table


def test_a_planted_underflow_is_found_where_it_is() -> None:
    audit = ampcompile.audit(planted(1e-4), dtype=HALF)(torch.randn(4, 8))
    assert audit.first_overflow is None
    first = audit.first_underflow
    assert first is not None and (first.op, first.module) == ("aten.mul", "1.1")
    assert audit.modules["1.1"].flushed > 0.4  # forward, at least


def test_gradients_that_underflow_are_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    audit = ampcompile.audit(model, dtype=HALF, loss=lambda y: mean_square(y) * 1e-8)(torch.randn(4, 8))
    first = audit.first_underflow
    assert first is not None and first.backward
    assert not any(op.numbers.flushed for op in audit.ops if not op.backward)
    assert audit.gradient_error == pytest.approx(1, abs=0.5)  # next to nothing is left of them
    scaled = ampcompile.audit(model, dtype=HALF, loss=lambda y: mean_square(y) * 2**10)(torch.randn(4, 8))
    assert scaled.first_underflow is None


NAN, INF = float("nan"), float("inf")


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


def test_inputs_that_are_not_finite_are_named() -> None:
    x = torch.randn(4, 8)
    x[1, :4] = INF
    audit = ampcompile.audit(layers())(x)
    assert audit.not_finite["input l_args_0_"] == 4 / 32 and audit.not_finite["output 0"] == 1 / 4
    assert audit.first_not_finite is not None and audit.first_overflow is None
    assert audit.outputs[0] < 0.1, "of the rows that are finite"
    assert set(audit.gradients) == {name for name, _ in layers().named_parameters()}
    assert math.isnan(audit.error) and audit.not_finite["gradient of 0.weight"] == 1
    assert "not finite: input l_args_0_ (12.5%)" in str(audit)
    audit = ampcompile.audit(layers(), cumulative=False)(torch.full((4, 8), NAN))
    assert audit.not_finite == {"input l_args_0_": 1} and audit.first_not_finite is not None


def test_weights_and_gradients_that_are_not_finite_are_named() -> None:
    model = layers()
    model[2].bias.data[0] = NAN
    audit = ampcompile.audit(model, backward=False)(torch.randn(4, 8))
    assert audit.not_finite == {"input 2.bias": 0.5, "output 0": 0.5}
    w = torch.zeros(4, requires_grad=True)
    audit = ampcompile.audit(lambda x, w: (x * 0 * w.sqrt()).sum())(torch.randn(4), w)
    first = audit.first_not_finite
    assert first is not None and first.backward and audit.not_finite == {"gradient of l_w_": 1}
    assert audit.outputs == [0] and math.isnan(audit.error)


def in_both(x: Tensor, w: Tensor) -> Tensor:
    return (0 * (x @ w)) / 0


def in_mixed(x: Tensor, w: Tensor) -> Tensor:
    y = (x * 300) @ (w * 300)  # beyond float16
    return y - y


def in_exact(x: Tensor, w: Tensor) -> Tensor:
    return (1 - (x @ w)).sqrt()  # 1.001, which 16 bits round to 1


@pytest.mark.parametrize(
    ("f", "op", "error"), [(in_both, "aten.div", NAN), (in_mixed, "aten.mm", INF), (in_exact, "aten.sqrt", INF)]
)
def test_an_op_that_gives_no_number_is_named(f: Callable[..., Tensor], op: str, error: float) -> None:
    x, w = torch.full((4, 4), 0.25), torch.full((4, 4), 1.001)
    audit = ampcompile.audit(f, dtype=HALF if f is in_mixed else torch.bfloat16, backward=False)(x, w)
    first = audit.first_not_finite
    assert first is not None and first.op == op and f"first not finite: {first}; " in str(audit)
    assert (audit.first_overflow is None) == (f is not in_mixed)
    assert audit.not_finite == {"output 0": 1} and audit.outputs == pytest.approx([error], nan_ok=True)


def test_masks_of_infinities_are_as_they_should_be() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    audit = ampcompile.audit(lambda x, w: (x @ w).masked_fill(mask, -INF).softmax(-1))(torch.randn(4, 4), torch.eye(4))
    assert not audit.not_finite and audit.first_not_finite is None and "not finite" not in str(audit)


def test_the_error_alone_is_that_of_one_op_on_the_mixed_runs_inputs() -> None:
    linear, x = nn.Linear(16, 8), torch.randn(4, 16)
    audit = ampcompile.audit(linear, backward=False)(x)
    low, weight, bias = (t.detach().bfloat16() for t in (x, linear.weight, linear.bias))
    found = torch.nn.functional.linear(low, weight, bias)
    exact = torch.nn.functional.linear(low.double(), weight.double(), bias.double())
    [product] = [op for op in audit.ops if op.op == "aten.addmm"]
    assert product.numbers.local == pytest.approx(error([found], [exact]))
    assert product.numbers.largest == float(found.abs().max())
    assert product.dtype == torch.bfloat16
    casts = [op.numbers for op in audit.ops if op.op == "aten._to_copy" and op.dtype == torch.bfloat16]
    assert len(casts) == 3 and all(cast.local == cast.cumulative for cast in casts)


def test_errors_from_start_are_those_against_a_model_in_float64() -> None:
    model, x = nn.Sequential(Block(), Block(), nn.Linear(8, 3)), torch.randn(16, 8)
    audit = ampcompile.audit(model, loss=mean_square)(x)
    output, gradient = exact_errors(model, x)
    assert audit.outputs == pytest.approx([output], rel=1e-6)
    assert audit.gradient_error == pytest.approx(gradient, rel=1e-3)  # sums may run in another order
    assert audit.gradients.keys() == dict(model.named_parameters()).keys()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y[:, 0].mul_(2)
    y += 1
    y.relu_()
    return y.view(-1)[1:].clone()


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.tanh(v @ w).exp(), x, use_reentrant=False)


def chosen(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e9, lambda x, w: w @ x, lambda x, w: torch.tanh(x @ w), (x, w))


@pytest.mark.parametrize("f", [in_place, checkpointed, chosen])
def test_writes_checkpoints_and_branches_are_audited(f: Callable[..., Tensor]) -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    before = x.detach().clone()
    audit = ampcompile.audit(f)(x, w)
    assert audit.outputs[0] < 0.02 and audit.gradient_error is not None and audit.gradient_error < 0.1
    assert not audit.unmeasured
    assert torch.equal(x, before) and x.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        found = f(x, w)
    assert audit.outputs[0] == pytest.approx(error([found], [f(x.double(), w.double())]), rel=1e-6)


def test_nothing_is_left_behind() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)), torch.randn(2, 3, 8, 8)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ampcompile.audit(model)(x)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_without_a_loss_the_mean_squares_of_all_results_are_differentiated() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    f = lambda x, w: (x @ w, (x * 2).sin())  # noqa: E731
    alone = ampcompile.audit(f)(x, w)
    given = ampcompile.audit(f, loss=lambda y: y[0].float().square().mean() + y[1].square().mean())(x, w)
    assert alone.gradients and alone.gradients == pytest.approx(given.gradients, rel=1e-3)


def test_gradients_have_the_names_of_parameters_also_of_modules_among_the_arguments() -> None:
    first, second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False))
    audit = ampcompile.audit(lambda x, inner: inner[0](first(x)))(torch.randn(2, 2), [second])
    assert {"0.weight"} <= audit.gradients.keys()
    audit = ampcompile.audit(first)(torch.randn(2, 2))
    assert audit.gradients.keys() == {"weight", "bias"}


def test_options_of_a_compiled_callable_are_used() -> None:
    compiled = torch.compile(nn.Linear(8, 8), backend="amp", options={"dtype": HALF})
    audit = ampcompile.audit(compiled)(torch.randn(2, 8))
    assert {op.dtype for op in audit.ops if op.op == "aten.addmm"} == {HALF}
    again = ampcompile.audit(compiled, policy="module *=fp32")(torch.randn(2, 8))
    assert {op.dtype for op in again.ops} == {torch.float32} and again.error < 1e-6


def test_wrong_requests_are_refused() -> None:
    for dtype in (torch.float16, torch.int32, None):
        with pytest.raises(OptionError, match=r"expected torch\.float64 or torch\.float32"):
            ampcompile.audit(nn.Linear(2, 2), against=dtype)
    with pytest.raises(AuditError, match="found no op to compare"):
        ampcompile.audit(lambda x: x)(torch.ones(1))
    inside = torch.compiler.disable(lambda x: x * 2)
    with pytest.raises(AuditError, match="found no op to compare"):
        ampcompile.audit(lambda x: inside(x))(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_none(mode: Any) -> None:
    with mode():
        audit = ampcompile.audit(nn.Linear(8, 8), dynamic=True)(torch.randn(2, 8))
    assert audit.outputs and audit.gradient_error is None and not any(op.backward for op in audit.ops)


def test_a_step_that_differentiates_inside_is_audited() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(16, 8)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    inside = ampcompile.audit(step)(x).gradients
    outside = ampcompile.audit(lambda x: model(x).square().mean())(x).gradients
    assert inside.keys() == outside.keys() == dict(model.named_parameters()).keys()
    assert list(inside.values()) == pytest.approx(list(outside.values()), rel=1e-3)
    assert all(p.grad is None for p in model.parameters())


def test_each_op_alone_needs_no_second_run() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, 8)
    audit = ampcompile.audit(model, cumulative=False, against=torch.float32)(x)
    assert audit.ops and all(op.numbers.cumulative is None for op in audit.ops)
    assert any(op.numbers.local for op in audit.ops if op.backward)
    with pytest.raises(AuditError, match="made with cumulative=False"):
        _ = audit.error


def test_errors_go_on_over_a_graph_break() -> None:
    def broken(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        torch._dynamo.graph_break()
        return m.second(torch.tanh(h))

    model, x = Net(broken, first=nn.Linear(8, 8), second=nn.Linear(8, 8)), torch.randn(16, 8)
    audit = ampcompile.audit(model, loss=mean_square)(x)
    [output], gradient = audit.outputs, audit.gradient_error
    twin = copy.deepcopy(model).double()
    exact = twin.second(torch.tanh(twin.first(x.double())))
    with torch.autocast("cpu", torch.bfloat16):
        found = model.second(torch.tanh(model.first(x)))
    assert output == pytest.approx(error([found], [exact]), rel=1e-6)
    assert gradient is not None and 0 < gradient < 0.1
    assert {op.module for op in audit.ops if op.op in ("aten.addmm", "aten.mm")} == {"first", "second"}


def test_dropout_draws_the_same_in_both_runs() -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)), torch.randn(4, 8)
    assert ampcompile.audit(model)(x).error < 0.05

    def by_hand(x: Tensor) -> Tensor:
        return torch.relu(x @ x.mT) * (torch.rand(4, 4) > 0.5) + torch.randn(4, 4)

    assert ampcompile.audit(by_hand)(x).error < 0.05


def test_a_loss_scale_multiplies_the_loss_also_where_none_is_given() -> None:
    """Gradients of 1e-9 become zero in float16, unless they are scaled."""
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    small = ampcompile.audit(lambda x: 1e-9 * linear(x).sum(), dtype=torch.float16)(x)
    scaled = ampcompile.audit(lambda x: 1e-9 * linear(x).sum(), dtype=torch.float16, loss_scale=2.0**16)(x)
    assert small.gradient_error > 0.9 and scaled.gradient_error < 0.01
