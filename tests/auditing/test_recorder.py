"""One audited call: with whose options, under which conditions, and with what is differentiated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.auditing.recorder import _mean_squares, named_parameters
from ampcompile.errors import AuditError, OptionError

HALF = torch.float16


def test_without_a_loss_the_mean_squares_of_all_results_are_differentiated() -> None:
    values = [torch.tensor([1.0, 3.0]), torch.tensor([3 + 4j])]
    assert _mean_squares(values).item() == 5 + 25, "complex numbers with their imaginary part"


def test_gradients_have_the_names_of_parameters_also_of_modules_among_the_arguments() -> None:
    first, second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False))
    names = {id(parameter): name for name, parameter in named_parameters(first, (torch.ones(1), [second]), {})}
    assert names == {id(first.weight): "weight", id(first.bias): "bias", id(second[0].weight): "0.weight"}


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
