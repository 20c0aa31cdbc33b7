"""Calls of torch's database are judged: what is right holds, what is wrong is told, with what stock does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from proof.ops import database, parts
from proof.ops.calls import Call
from proof.ops.judge import RAISES, STOCK_FAILS, Setting, judge
from proof.ops.parts import DEFAULT, MIXED, OPERATORS, SETTINGS
from proof.results import Failure

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's deprecations, met on purpose
SETTING = Setting(torch.bfloat16, ambient=True, gradients=True)
MATMUL = Call(torch.matmul, (torch.ones(2, 3, requires_grad=True), torch.ones(3, 2)), {})


def test_groups_are_names_and_all_are_more() -> None:
    few, everything = OPERATORS.groups(False), OPERATORS.groups(True)
    assert len(few) == 4 * len(database.list_operators()) and set(few) < set(everything)
    assert len(DEFAULT) == 4 and len(SETTINGS) == 8
    assert {(s.ambient, s.gradients) for name, s in SETTINGS.items() if name in DEFAULT} == {
        (True, True),
        (False, False),
    }


def test_the_sample_and_the_rest_are_all_calls_always_the_same() -> None:
    drawn, again = list(database.draw_calls("add")), list(database.draw_calls("add"))
    assert [place for place, _ in drawn] == [place for place, _ in again] and len(drawn) == database.DRAWN
    assert all(torch.equal(a.floats()[0], b.floats()[0]) for (_, a), (_, b) in zip(drawn, again, strict=True))
    places = [place for place, _ in (*drawn, *database.draw_calls("add", rest=True))]
    assert sorted(places) == list(range(len(database.make_calls("add"))))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_group_holds(name: str) -> None:
    verdict = OPERATORS.run(f"addmm, {name}")
    assert verdict.counts.keys() <= {"same bits", "as near"} and sum(verdict.counts.values()) == database.DRAWN
    assert not verdict.failures


def test_what_is_random_or_raises_is_counted_apart() -> None:
    assert OPERATORS.run('empty_like, bfloat16, outputs="autocast", forward').counts == {"random": database.DRAWN}
    assert judge(Call(torch.matmul, (torch.ones(2), torch.ones(3)), {}), SETTING, False) == (RAISES, [])


WRONG: dict[str, Callable[[Any], Any]] = {
    "dtypes": lambda y: y.float(),
    "values": lambda y: y + 1,
    "strides": lambda y: y.t().contiguous().t(),
    "raises": lambda y: 1 / 0,
}


def compile_by(monkeypatch: pytest.MonkeyPatch, compile_: Callable[[Any], Any], of: str = "amp") -> None:
    monkeypatch.setattr(Setting, of, lambda _: compile_)


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda f: lambda *args: WRONG[kind](f(*args))
    compile_by(monkeypatch, wrong)
    outcome, (failure,) = judge(MATMUL, SETTING, False)
    assert (outcome, failure.kind, failure.stock) == ("fails", kind, False)
    compile_by(monkeypatch, wrong, "stock")
    outcome, (failure,) = judge(MATMUL, SETTING, False)
    assert (outcome, failure.kind, failure.stock) == (STOCK_FAILS, kind, True)


def test_a_graph_that_the_backend_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise DynamicOutputShapeException("aten.nonzero.default")

    monkeypatch.setattr("ampcompile.compiler.backend.rewrite", refuses)
    assert "refused" in {failure.kind for failure in judge(MATMUL, SETTING, False)[1]}


@pytest.mark.parametrize("pair", parts.MIXED_PAIRS)
def test_mixed_operands_hold_or_are_refused_by_eager_autocast(pair: str) -> None:
    assert MIXED.run(f"add, {pair}").failures == []
    assert MIXED.run(f"scatter, {pair}").counts.keys() <= {"same bits", "ours runs", RAISES}


def test_what_ours_alone_runs_is_held_against_a_call_without_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by(monkeypatch, lambda f: lambda *args: torch.zeros(10, 5) + 100)
    verdict = MIXED.run("scatter, bf16 x f32")
    assert verdict.counts == {"fails": 1} and isinstance(verdict.failures[0], Failure)
