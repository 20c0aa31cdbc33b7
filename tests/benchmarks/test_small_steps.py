"""Peers on small models take turns in one process or in their own; who doesn't run in 16 bits is found out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import small_steps as module
from benchmarks.candidate import UnfairError
from benchmarks.small_steps import CALL, STEP, Here, SmallCandidate, measure_apart, take_turns


class Runner:
    """A candidate whose every step takes as long as said, until it breaks."""

    def __init__(self, name: str, log: list[str], seconds: float, answers: int = 99) -> None:
        self.name, self.log, self.seconds, self.answers = name, log, seconds, answers

    def _say(self, what: str) -> float:
        self.answers -= 1
        if self.answers < 0:
            raise RuntimeError("broken")
        self.log.append(f"{self.name} {what}")
        return self.seconds

    def prepare(self) -> dict[str, float]:
        self._say("prepare")
        return {"error": 0.0}

    def begin(self) -> float:
        return self._say("begin")

    def round(self, times: int) -> float:
        return self._say(f"{times} times")

    def recompiled(self) -> int:
        return 0


def test_turns_alternate_in_seven_rounds_and_who_fails_is_out() -> None:
    log: list[str] = []
    runners = Runner("a", log, 1e-3), Runner("b", log, 1.0), Runner("c", log, 1.0, answers=4)
    a, b, c = take_turns("case", {runner.name: Here(runner) for runner in runners})
    assert log[:6] == ["a prepare", "b prepare", "c prepare", "a begin", "b begin", "c begin"]
    assert log[6:12] == ["a 100 times", "b 100 times", "c 100 times", "c 100 times", "b 100 times", "a 100 times"]
    assert a.figures["seconds"] == [1e-3] * 7 and b.figures["seconds"] == [1.0] * 7 and b.figures["recompiled"] == 0
    assert c.why == "RuntimeError: broken" and not c.figures


def test_a_round_has_fifty_steps_at_least() -> None:
    log: list[str] = []
    take_turns("case", {"a": Here(Runner("a", log, 1.0))})
    assert log[2] == "a 50 times"


@pytest.mark.parametrize("what", [STEP, CALL])
def test_eager_peers_compute_in_the_type_they_claim(what: str) -> None:
    for peer, low in (("eager fp32", False), ("eager autocast", True)):
        candidate = SmallCandidate("MLP 3x64", what, peer)
        figures = candidate.prepare()
        assert bool(figures["casts"]) == low == (figures["error"] > 1e-4)
        assert candidate.begin() > 0 and candidate.round(3) > 0 and candidate.recompiled() == 0


def test_a_step_trains() -> None:
    candidate = SmallCandidate("SAC", STEP, "eager fp32")
    candidate.prepare()
    before = [p.clone() for p in candidate.parameters()]
    candidate.round(2)
    assert not any(torch.equal(p, was) for p, was in zip(candidate.parameters(), before, strict=True))


@pytest.mark.parametrize("what", [STEP, CALL])
def test_ours_multiplies_in_16_bits_or_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SmallCandidate("MLP 3x64", what, "amp").prepare()
    assert figures["low_products"] >= 3 and figures["graphs"] == 1 and 1e-4 < figures["error"] < 0.1
    torch._dynamo.reset()
    monkeypatch.setattr(module, "check_fairness", lambda *_: None)
    candidate = SmallCandidate("MLP 3x64", what, "Inductor + autocast")
    candidate._around = lambda: torch.autocast("cpu", enabled=False)
    with pytest.raises(UnfairError, match="found 0 products in 16 bits"):
        candidate.prepare()


@pytest.mark.ci
def test_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = iter(range(9))

    @contextmanager
    def caches() -> Iterator[Path]:
        yield tmp_path / str(next(folders))

    monkeypatch.setattr(module, "NAMES", ("eager fp32", "eager autocast"))
    full, low = measure_apart("MLP 3x64", CALL, caches)
    assert full.case == low.case == "MLP 3x64: call without gradients"
    assert len(full.figures["seconds"]) == len(low.figures["seconds"]) == 7
