"""Peers take turns in rounds common to all; who can't run, or fails, says why."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import race as module
from benchmarks.apart import FailedError
from benchmarks.race import Race, race
from benchmarks.works import CLIPPED, PLAIN, Work


class Runner:
    """A peer whose every call takes `seconds`, and that fails after some answers."""

    def __init__(self, name: str, log: list[str], seconds: float, answers: int = 1000) -> None:
        self.name, self.log, self.seconds, self.answers = name, log, seconds, answers

    def ask(self, method: str, *args: object) -> float:
        self.answers -= 1
        if self.answers < 0:
            raise FailedError("its process died")
        self.log.append(f"{self.name} {method}")
        return self.seconds


def running(*runners: Runner) -> Race:
    contest = Race({})
    contest.running = {runner.name: runner for runner in runners}
    return contest


def test_turns_alternate() -> None:
    log: list[str] = []
    times = running(Runner("a", log, 0.01), Runner("b", log, 0.02)).time("case", 1e9)
    assert log[:8] == ["a begin", "b begin", "a round", "b round", "b round", "a round", "a round", "b round"]
    assert times == {"a": [0.01] * module.ROUNDS[1], "b": [0.02] * module.ROUNDS[1]}


def test_a_small_budget_still_gives_quartiles() -> None:
    times = running(Runner("a", [], 9.0)).time("case", 1.0)
    assert len(times["a"]) == module.ROUNDS[0]


def test_long_rounds_are_few() -> None:
    times = running(Runner("a", [], 9.0), Runner("b", [], 2.0)).time("case", 1.0)
    assert len(times["a"]) == len(times["b"]) == module.FEW_ROUNDS


def test_who_fails_on_the_way_is_out_and_the_others_go_on() -> None:
    contest = running(Runner("a", [], 0.1, answers=4), Runner("b", [], 0.1))
    times = contest.time("case", 1e9)
    assert list(times) == ["b"] and len(times["b"]) == module.ROUNDS[1]
    assert contest.out == {"a": "its process died"}


def test_a_round_has_calls_enough_and_rows_say_who_is_out() -> None:
    asked: list[tuple] = []

    class Here(Runner):
        def ask(self, method: str, *args: object) -> Any:
            asked.append((method, *args))
            seconds = super().ask(method, *args)
            return {"figure": method} if method in ("prepare", "end") else seconds

    contest = Race({}, least=50)
    contest.enter("a", Here("a", [], 1.0))
    contest.enter("b", Here("b", [], 1.0, answers=1))
    a, b = contest.rows(["case"])
    assert asked.count(("round", 50)) == module.FEW_ROUNDS
    assert a.figures == {"seconds": [1.0] * module.FEW_ROUNDS, "figure": "end"}
    assert (b.case, b.why, b.figures) == ("case", "its process died", {})


@pytest.mark.ci
@pytest.mark.parametrize("training", [(), (PLAIN, CLIPPED)])
def test_real_peers(training: tuple, tmp_path: Path) -> None:
    folders = iter(range(9))

    @contextmanager
    def caches() -> Iterator[Path]:
        yield tmp_path / str(next(folders))

    peers = ("eager fp32", "eager autocast", "Inductor + autocast, reduce-overhead")
    work = Work("tiny GPT 23M", 2, 8, peers, training)
    rows = {(row.case, row.peer): row for row in race(work, "cpu", 0.1, caches)}
    assert len(rows) == 3 * max(1, len(training))
    for case, _ in work.cases():
        full, low, unable = (rows[case, peer] for peer in peers)
        assert "all it adds is CUDA graphs" in unable.why
        assert len(full.figures["seconds"]) == len(low.figures["seconds"]) >= module.ROUNDS[0]
        assert full.figures["casts"] == 0 < low.figures["casts"]
        assert full.figures["error"] < 1e-6 < low.figures["error"]
        if training:
            assert full.figures["losses"][0] == pytest.approx(low.figures["losses"][0], rel=1e-2)
