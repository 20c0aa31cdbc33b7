"""Candidates are timed in turn, forwards and backwards; one that fails is out; rounds last as long as is asked."""

import time

import pytest

from ampcompile import timing
from ampcompile.timing import calls_in_a_round, take_turns, time_call


def test_turns_go_back_and_forth_and_who_fails_is_out() -> None:
    asked: list[str] = []

    def time_one(name: str) -> float | None:
        asked.append(name)
        return None if name == "b" and asked.count("b") == 2 else float(len(asked))

    assert take_turns(time_one, "abc", 3) == {"a": [1.0, 6.0, 7.0], "c": [3.0, 4.0, 8.0]}
    assert "".join(asked) == "abccbaac" and take_turns(lambda _: None, "ab", 3) == {}


def test_rounds_go_on_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def time_one(name: str) -> float:
        now[0] += 1
        return now[0]

    assert take_turns(time_one, "a", 2, 5.0) == {"a": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert take_turns(time_one, "a", 2, 1.0) == {"a": [6.0, 7.0]}


def test_a_round_has_enough_calls_of_the_fastest() -> None:
    assert calls_in_a_round({"a": 0.02, "b": 1.0}, 0.05) == 3 and calls_in_a_round({"a": 2.0}, 0.05) == 1
    calls: list[int] = []
    seconds = time_call("cpu", lambda: (calls.append(1), time.sleep(1e-3)), 3)
    assert len(calls) == 3 and 1e-3 <= seconds < 1
