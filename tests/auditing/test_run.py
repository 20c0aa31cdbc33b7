"""Two runs side by side: each op alone and the whole run, over graph breaks, random numbers and backwards."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampcompile
from ampcompile.auditing import run as audit_run
from ampcompile.auditing.high_precision import compute_in_high_precision
from ampcompile.auditing.run import Session
from ampcompile.errors import AuditError
from tests.auditing.models import Block, mean_square
from tests.compiling import error

# Dynamo asks every tensor that crosses a graph break for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def test_an_input_that_no_graph_made_is_exact_and_another_has_its_own_value() -> None:
    session = Session(torch.float64, cumulative=True, local=True)
    given, passed_on = torch.ones(2), torch.ones(2)
    session.exact[passed_on] = torch.full((2,), 1.5, dtype=torch.float64)
    assert session.exact_of(given).dtype == torch.float64 and session.exact_of(given).tolist() == [1, 1]
    assert session.exact_of(passed_on).tolist() == [1.5, 1.5]
    assert session.exact_of(passed_on[1:]).tolist() == [1.5] and session.exact_of(given[1:]).tolist() == [1]
    assert session.exact_of(3) == 3


def test_gradients_of_several_uses_are_summed_before_they_are_compared() -> None:
    session = Session(torch.float64, cumulative=True, local=True)
    exact = torch.tensor([3.0, 0.0], dtype=torch.float64)
    session.add_gradient("w", torch.tensor([1.0, 1.0]), exact)
    session.add_gradient("w", torch.tensor([2.0, 1.0]), exact)
    session.add_gradient("b", torch.tensor([2.0, 0.0]), exact)
    found = session.gradient_errors()
    assert found.keys() == {"w", "b"}
    assert found["w"] == pytest.approx((9.0 + 4.0, 36.0)) and found["b"] == pytest.approx((1.0, 9.0))


def test_each_op_alone_needs_no_second_run_and_the_memory_of_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(*args: Any) -> Any:
        nonlocal most
        most = max(most, sum(tensor() is not None for tensor in held))
        result = compute_in_high_precision(*args)
        held.extend(weakref.ref(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    monkeypatch.setattr(audit_run, "compute_in_high_precision", watched)
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(4, 8)
    audit = ampcompile.audit(model, cumulative=False, against=torch.float32)(x)
    assert audit.ops and all(op.numbers.cumulative is None for op in audit.ops)
    assert any(op.numbers.local for op in audit.ops if op.backward)
    with pytest.raises(AuditError, match="made with cumulative=False"):
        _ = audit.error
    assert len(held) > 100 and most == 0  # none is left when the next op begins
    ampcompile.audit(model)(x)
    assert most > 30


def test_errors_go_on_over_a_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            return self.second(torch.tanh(h))

    model, x = Broken(), torch.randn(16, 8)
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
