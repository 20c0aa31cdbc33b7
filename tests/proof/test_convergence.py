"""Where training ends is held against what float32 itself scatters by."""

import pytest
import torch

from proof import expected
from proof.convergence.sweep import CONTROL, PART, Ending, find_endings
from proof.convergence.training import train
from proof.results import find_records, read_verdicts
from tests.proof.shortened import shorten


def ending(difference: float) -> Ending:
    return Ending({"amp": [difference] * 4}, seeds=0.1, shakes=0.01)


def test_a_difference_within_both_scatters_holds_and_a_larger_one_doesnt() -> None:
    assert ending(0.0).holds() and ending(0.019).holds() and ending(-0.019).holds()
    assert not ending(0.021).holds() and not ending(-0.021).holds()
    assert not Ending({"amp": [0.5] * 4}, seeds=0.1, shakes=1.0).holds()


def test_the_same_seed_gives_the_same_run_and_another_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 3)
    first, again, shaken, other = (
        train("ResNet", seed, "float32", shake=shake) for seed, shake in ((0, None), (0, None), (0, 1), (1, None))
    )
    assert first == again and first[0] == pytest.approx(shaken[0], rel=0.01)
    assert first != shaken and abs(other[0] - first[0]) > abs(shaken[0] - first[0])


def test_amp_trains_as_eager_autocast_does(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 75)
    verdict = PART.run("ResNet, bfloat16, seed 0")
    first, last = verdict.figures["amp"]
    assert not verdict.failures and last < 0.8 * first
    assert verdict.figures["eager autocast"][1] == pytest.approx(last, rel=0.01)


def test_a_run_that_goes_another_way_is_told_with_what_stock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"eager autocast": 1.0, "amp": 1.2, CONTROL: 1.0, "stock": 1.0}
    monkeypatch.setattr("proof.convergence.sweep.train", lambda name, seed, how, low: [3.0] * 9 + [ends[how]] * 20)
    (failure,) = PART.run("GPT, bfloat16, seed 0").failures
    assert (failure.kind, failure.stock) == ("training", False)
    ends["stock"] = 1.3
    assert PART.run("GPT, bfloat16, seed 0").failures[0].stock
    ends |= {"amp": 2.9, "eager autocast": 2.9}
    assert [failure.kind for failure in PART.run("GPT, float16, seed 0").failures] == ["learning"] * 2


def test_the_committed_runs_hold_and_would_have_found_weights_in_16_bits() -> None:
    found = find_endings(read_verdicts(find_records("convergence")))
    known = {entry.name for entry in expected.EXPECTED if entry.part == "convergence"}
    assert {name for (name, _), end in found.items() if not end.holds()} <= known
    assert not any(end.holds(CONTROL) for end in found.values() if CONTROL in end.differences)


def test_no_copy_of_a_weight_means_that_nothing_ran_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 3)
    monkeypatch.setattr("proof.convergence.training.amp", lambda **_: lambda model: model)
    with pytest.raises(AssertionError, match="no weight was used in 16 bits"):
        train("ResNet", 0, "amp", torch.bfloat16)
