"""The audit tells how wrong a mixed run is and where, and leaves everything else as it was."""

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile.errors import AuditError, OptionError
from ampcompile.insight.audit import Audit
from tests.compiling import compiled, error, gradients, keep_small_values_too
from tests.insight.models import mean_square, planted
from tests.models import Block, Net

HALF = torch.float16


NAN, INF = float("nan"), float("inf")


def layers(bias: float = 0.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    model[2].bias.data[0] = bias
    return model


HALVES, FORWARD = {"dtype": HALF}, {"backward": False}
Case = tuple[Any, tuple[Tensor, ...], dict[str, Any]]


def planted_numbers() -> dict[str, Case]:
    """What is audited, with which arguments, and how."""
    x, (a, b) = (torch.randn(4, 8),), (torch.full((4, 4), 0.25), torch.full((4, 4), 1.001))
    infinite = x[0].clone()
    infinite[1, :4] = INF
    return {
        "overflow": (planted(6e4), x, HALVES),
        "overflow in float32 too": (planted(3e30), x, FORWARD),
        "underflow": (planted(1e-4), x, HALVES),
        "underflow of gradients": (layers(), x, HALVES | {"loss": lambda y: mean_square(y) * 1e-8}),
        "none of scaled ones": (layers(), x, HALVES | {"loss": lambda y: mean_square(y) * 2**10}),
        "an input": (layers(), (infinite,), {}),
        "no number in an input": (layers(), (x[0] * NAN,), {"cumulative": False}),
        "a weight": (layers(bias=NAN), x, FORWARD),
        "a gradient": (lambda x, w: (x * 0 * w.sqrt()).sum(), (x[0][0], torch.zeros(8, requires_grad=True)), {}),
        "both runs": (lambda x, w: (0 * (x @ w)) / 0, (a, b), FORWARD),
        "beyond float16": (lambda x, w: (y := (x * 300) @ (w * 300)) - y, (a, b), HALVES | FORWARD),
        "the exact run: 16 bits round 1.001": (lambda x, w: (1 - (x @ w)).sqrt(), (a, b), FORWARD),
        "a mask": (lambda x, w: (x @ w).masked_fill(w > 0, -INF).softmax(-1), (a, torch.eye(4)), {}),
    }


SAID = """
overflow
  not finite: output 0 (100.0%), gradient of 0.weight (100.0%), gradient of 0.bias (100.0%) and 4 more
  first not finite: aten.mul in 1.1, models.py
  outputs: infinite
  all gradients together: infinite
  first overflow: aten.mul in 1.1, models.py
overflow in float32 too
  not finite: output 0 (100.0%)
  first not finite: aten.addmm in 2
  outputs: not finite
underflow
  first flush to zero: aten.mul in 1.1, models.py
underflow of gradients
  all gradients together: large
  first flush to zero: aten._to_copy (backward) in no module
none of scaled ones
an input
  not finite: input l_args_0_ (12.5%), output 0 (25.0%), gradient of 0.weight (100.0%) and 3 more
  first not finite: aten.addmm in 0
  all gradients together: not finite
no number in an input
  not finite: input l_args_0_ (100.0%)
  first not finite: aten._to_copy in 0
a weight
  not finite: input 2.bias (50.0%), output 0 (50.0%)
  first not finite: aten._to_copy in 2
a gradient
  not finite: gradient of l_w_ (100.0%)
  first not finite: aten.div (backward) in no module, test_audit.py
  all gradients together: not finite
both runs
  not finite: output 0 (100.0%)
  first not finite: aten.div in no module, test_audit.py
  outputs: not finite
beyond float16
  not finite: output 0 (100.0%)
  first not finite: aten.mm in no module, test_audit.py
  outputs: infinite
  first overflow: aten.mm in no module, test_audit.py
the exact run: 16 bits round 1.001
  not finite: output 0 (100.0%)
  first not finite: aten.sqrt in no module, test_audit.py
  outputs: infinite
a mask
"""


def headlines(audit: Audit) -> list[str]:
    """What the text says first, without numbers of lines, and of errors those that aren't small."""
    text = re.sub(
        r"(\.py):\d+|relative error of (?:the )?|, unknown line|; \d+ ops in all",
        r"\1",
        str(audit).partition("\n\n")[0],
    )
    text = re.sub(r"\d\.\de\S\d\d", lambda found: "small" if float(found[0]) < 0.1 else "large", text)
    return [line for line in text.splitlines()[1:] if not line.endswith((": none", ": small"))]


def test_numbers_that_overflow_underflow_or_are_not_finite_are_found_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    said = "\n"
    for name, (f, args, how) in planted_numbers().items():
        audit = ampcompile.audit(f, **how)(*args)
        assert max(map(len, str(audit).splitlines())) <= 110
        said += "\n  ".join([name, *headlines(audit)]) + "\n"
    assert said == SAID


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


def broken(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    torch._dynamo.graph_break()
    return m.second(torch.tanh(h))


def test_errors_from_start_are_those_against_a_model_in_float64_also_over_a_graph_break() -> None:
    model, x = Net(broken, first=Block(), second=nn.Linear(8, 3)), torch.randn(16, 8)
    audit, twin = ampcompile.audit(model, loss=mean_square)(x), copy.deepcopy(model).double()
    found, exact = compiled(model)[0](x), twin(x.double())
    assert audit.outputs == pytest.approx([error([found], [exact])], rel=1e-6)
    both = [gradients(m, lambda _, y=y: mean_square(y)) for m, y in ((model, found), (twin, exact))]
    assert audit.gradient_error == pytest.approx(error(*both), rel=1e-3)  # sums may run in another order
    assert audit.gradients.keys() == dict(model.named_parameters()).keys()
    products = {op.module for op in audit.ops if op.op in ("aten.addmm", "aten.mm")}
    assert products == {"first.up", "first.down", "second"}


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


@torch.compiler.disable
def draw() -> None:
    """Numbers of Python's and NumPy's generators, some hundred of which show in the state."""
    random.random()
    np.random.rand(700)


@pytest.mark.parametrize("look", [ampcompile.audit, ampcompile.record])
def test_nothing_is_left_behind(look: Callable[..., Any]) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)), torch.randn(2, 3, 8, 8)
    state, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    others = random.getstate(), np.random.get_state()[1].tolist()

    def jittered(x: Tensor) -> Tensor:
        draw()
        return model(x)

    look(jittered, lower="aot_eager")(x)
    assert others == (random.getstate(), np.random.get_state()[1].tolist())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_without_a_loss_the_mean_squares_of_all_results_are_differentiated() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    f = lambda x, w: (x @ w, (x * 2).sin())
    alone = ampcompile.audit(f)(x, w)
    given = ampcompile.audit(f, loss=lambda y: y[0].float().square().mean() + y[1].square().mean())(x, w)
    assert alone.gradients and alone.gradients == pytest.approx(given.gradients, rel=1e-3)


def test_gradients_have_the_names_of_parameters_also_of_modules_among_the_arguments() -> None:
    first, second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False))
    audit = ampcompile.audit(lambda x, inner: inner[0](first(x)))(torch.randn(2, 2), [second])
    assert {"0.weight"} <= audit.gradients.keys()


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


def test_a_value_kept_in_8_bits_has_its_error_alone_and_gradients_are_those_of_the_compiled_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_small_values_too(monkeypatch)
    model, x = nn.Sequential(*(Block(16, activation=F.gelu) for _ in range(2))), torch.randn(4, 8, 16)
    how: dict[str, Any] = {"saved": "fp8", "products": "torch", "lower": "aot_eager"}
    audit = ampcompile.audit(model, **how)(x)
    listed = [r for r in ampcompile.explain(model, **how)(x).saved if not r.alive_anyway]
    rows = {(r.op, r.module, r.shape, r.kept_as): r.error for r in audit.saved if not r.because.endswith("of a weight")}
    assert rows.keys() == {(r.op, r.module, r.shape, r.kept_as) for r in listed}
    assert all((0.02 < (e or 0) < 0.03) is (row[3] == torch.float8_e4m3fn) for row, e in rows.items())
    low = sum(row[3] == torch.float8_e4m3fn for row in rows)
    assert f"kept for backward in 8 bits: {low} of" in str(audit) and all(op.dtype.itemsize > 1 for op in audit.ops)
    run, exact = torch.compile(model, backend="amp", options=how), copy.deepcopy(model).double()
    found = gradients(model, lambda _: run(x).square().mean())
    right = gradients(exact, lambda exact: exact(x.double()).square().mean())
    assert audit.gradient_error == pytest.approx(error(found, right), rel=0.05)


def test_the_error_alone_of_a_kept_value_is_that_of_all_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_small_values_too(monkeypatch)
    x, w = torch.ones(2, 128), torch.randn(128, 4, requires_grad=True)
    x[0, :8], x[0, 8:] = 448.0, 2.0**-11  # too small beside the largest: they become 0
    run = lambda x, w: ((x * 1) @ w).sum()
    (record,) = (r for r in ampcompile.audit(run, saved="fp8", products="torch")(x, w).saved if r.error)
    assert record.error == pytest.approx(float(x[0, 8:].norm() / x.norm()), rel=1e-3)
