"""Models are judged: what is right holds, what is wrong or stale is told, what is not installed counts apart."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proof.models import generating, judge, sweep
from proof.models.judge import DRAWS, Way
from proof.models.subject import MODES, Run, Subject
from proof.models.sweep import CASES, MISSING, PART
from proof.models.tally import Errors, Tally
from proof.ops.calls import autocast
from proof.ops.judge import FAILS, RAISES, STOCK_FAILS

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's deprecations, met on purpose
LOW = torch.bfloat16


def test_each_architecture_is_in_the_sample_in_training_and_in_another_mode() -> None:
    few, everything = PART.groups(False), PART.groups(True)
    assert len(CASES) > 150 and set(few) < set(everything) and len(set(everything)) == len(everything)
    plain = [tuple(group.split(", ")) for group in few if group.split(", ")[2] in MODES and "inductor" not in group]
    assert [name for name, *_ in plain] == [name for name in CASES for _ in range(2)]
    for first, other in zip(plain[::2], plain[1::2], strict=True):
        assert first[2] == "train" != other[2] and first[1] != other[1]
    assert {group.split(", ")[2] for group in few} == {*MODES, *generating.CACHES}


@pytest.mark.parametrize("group", ["mlp, bfloat16, train", "mlp, float16, eval", "mlp, bfloat16, no_grad"])
def test_a_model_holds(group: str) -> None:
    verdict = PART.run(group)
    assert verdict.counts.keys() <= {"same bits", "as near"} and not verdict.failures
    assert verdict.figures.keys() == {"compile", "stock"}


def test_gradients_of_gradients_hold_where_stock_has_none() -> None:
    assert not PART.run("second derivatives, bfloat16, train").failures


def compiled(run: Callable[..., Any]) -> Any:
    return torch.compile(run, backend="eager")


def lossy(model: nn.Module) -> Any:
    """The model with eight bits less than it should have."""
    return lambda x: compiled(model)(x) * 1.05


def stale(model: nn.Module) -> Any:
    """The model as it was when it was compiled."""
    was = copy.deepcopy(model)

    def run(x: Tensor) -> Tensor:
        now = {name: p for name, p in model.named_parameters()}
        old = {name: p.detach() + (now[name] - now[name].detach()) for name, p in was.named_parameters()}
        return torch.func.functional_call(was, old, (x,))

    return run


def broken(model: nn.Module) -> Any:
    """The model in two graphs."""
    again = compiled(lambda y: y * 1)
    return lambda x: again(compiled(model)(x))


def wide(model: nn.Module) -> Any:
    """The model with results in float32."""
    return lambda x: compiled(model)(x).float()


WRONG: dict[str, Callable[[nn.Module], Any]] = {
    "values": lossy,
    "dtypes": wide,
    "stale after a step": stale,
    "graphs": broken,
    "raises": lambda _: lambda x: 1 / 0,
}


def give(monkeypatch: pytest.MonkeyPatch, make: Callable[[nn.Module], Any], to: str = "ours") -> None:
    """Have the judge take this for the way of ours, or of stock's."""
    monkeypatch.setattr(judge, to, lambda *_: Way(make, lambda: autocast(LOW)))


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_told_and_whether_stock_is_wrong_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, WRONG[kind])
    verdict = PART.run("mlp, bfloat16, train")
    (failure,) = verdict.failures
    assert (failure.kind, failure.stock, verdict.counts) == (kind, False, {FAILS: 1})
    assert kind != "dtypes" or "torch.float32" in failure.text
    if kind != "graphs":
        give(monkeypatch, WRONG[kind], "stocks")
        assert PART.run("mlp, bfloat16, train").counts == {STOCK_FAILS: 1}


def test_zeros_where_eager_has_no_gradient_are_told_and_the_rest_compared() -> None:
    tally, x = Tally(), torch.ones(3)
    tally.add(Run([x + 1], [torch.zeros(3)], []), Run([x], [None], []), Run([x], [None], []))
    assert "gradients[0]" in tally.zeros and not tally.dtypes and tally.worse()
    tally.add(Run([x], [x], []), Run([x], [None], []), Run([x], [None], []))
    assert "eager NoneType" in tally.dtypes


def test_writes_through_data_are_made_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "step", lambda _: None)
    give(monkeypatch, stale)
    (failure,) = PART.run("mlp, bfloat16, train").failures
    assert failure.kind == "stale after .data"


def test_what_cannot_be_run_counts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mlp"]
    monkeypatch.setitem(sweep.CASES, "mlp", dataclasses.replace(case, package="no_such_package"))
    assert PART.run("mlp, bfloat16, train").counts == {MISSING: 1}
    monkeypatch.setitem(sweep.CASES, "mlp", dataclasses.replace(case, call=lambda run, inputs: 1 / 0))
    assert PART.run("mlp, bfloat16, train").counts == {RAISES: 1}
    text = PART.tabulate([PART.run(f"mlp, bfloat16, {mode}") for mode in MODES])
    assert "none hold" in text and RAISES in text


def run_of(*outputs: Tensor) -> Run:
    return Run(list(outputs), [], [])


@pytest.mark.parametrize("times, wrong", [(0.5, False), (1.05, False), (1.3, True)])
def test_errors_are_summed_over_tensors_and_draws(times: float, wrong: bool) -> None:
    tally = Tally()
    for _ in range(DRAWS[0]):
        exact = [torch.randn(50, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)]
        noise = [0.01 * torch.randn_like(e) for e in exact]
        near, ours = ([(e + n * k).float() for e, n in zip(exact, noise, strict=True)] for k in (1, times))
        tally.add(run_of(*ours), run_of(*near), run_of(*exact))
    assert bool(tally.worse()) == wrong
    for draw in tally.draws["outputs"]:
        assert draw.ours == pytest.approx(times * draw.theirs, rel=1e-3)
        assert 0.005 < draw.theirs < 0.05 and draw.ulp < 1e-6


def test_one_input_may_be_far_off_not_a_quarter_of_them() -> None:
    good, bad, never = Errors(1.0, 1.0, 0.0), Errors(1e6, 1.0, 0.0), Errors(1e-9, 0.0, 0.0)
    assert not Tally(same=False, draws={"outputs": [good] * 17 + [bad]}).worse()
    assert not Tally(same=False, draws={"outputs": [Errors(1e-6, 1.0, 0.0)] * 2 + [bad]}).worse()
    assert Tally(same=False, draws={"outputs": [good] * 15 + [bad] * 5}).worse()
    assert Tally(same=False, draws={"buffers": [good] * 17 + [never]}).worse()


def test_what_should_be_zero_has_no_relative_error() -> None:
    tally, large = Tally(), torch.ones(8, dtype=torch.float64)
    zero = torch.zeros(8, dtype=torch.float64)
    tally.add(run_of(large.float(), zero.float() + 1e-7), run_of(large.float(), zero.float()), run_of(large, zero))
    assert tally.draws["outputs"][0].ours < 1e-4


def test_lost_numbers_are_told() -> None:
    tally, x = Tally(), torch.ones(3)
    tally.add(run_of(x / torch.tensor([1, 0, 1])), run_of(x), run_of(x.double()))
    assert "1 not finite" in tally.worse()
    tally = Tally()
    tally.add(run_of(x), run_of(x, x), run_of(x, x))
    assert "1 tensors; eager 2" in tally.dtypes


@pytest.mark.parametrize("cache", [pytest.param(name, marks=pytest.mark.ci) for name in generating.CACHES])
def test_generated_tokens_are_those_of_eager_autocast(cache: str) -> None:
    assert PART.run(f"llama, bfloat16, {cache}").counts.keys() <= {generating.SAME, generating.TIE}


def test_other_tokens_are_told_unless_they_are_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = generating.Writer(CASES["llama"], LOW)
    theirs = writer.tokens(lambda f: f, autocast(LOW), "dynamic cache")
    assert theirs.shape == (2, generating.PROMPT + generating.NEW) and writer.difference(theirs, theirs) == ""
    others = theirs.clone()
    others[1, -1] = (theirs[1, -1] + 20) % 64
    assert "row 1, token 14" in writer.difference(others, theirs)
    exact = writer.subject.exact({"input_ids": theirs[1:, :-1]})
    monkeypatch.setattr(Subject, "exact", lambda *_: Run([torch.zeros_like(exact.outputs[0])], [], []))
    assert writer.difference(others, theirs) == ""
