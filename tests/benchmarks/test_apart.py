"""An object in another process: its answers, its failures, its caches."""

import os
from functools import partial
from pathlib import Path

import pytest

from benchmarks import apart as module
from benchmarks.apart import FailedError, apart


class Counter:
    """Something with state."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, more: int) -> int:
        self.value += more
        return self.value

    def fail(self) -> None:
        raise ValueError("not today\nbecause")

    def die(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        while True:
            pass


def test_state_lives_there(tmp_path: Path) -> None:
    with apart(Counter, 5, caches=tmp_path) as counter:
        assert [counter.ask("add", 2), counter.ask("add", 3)] == [7, 10]


def test_caches_are_its_own(tmp_path: Path) -> None:
    before = dict(os.environ)
    with apart(partial, os.getenv, caches=tmp_path) as environment:
        assert environment.ask("__call__", "TORCHINDUCTOR_CACHE_DIR") == f"{tmp_path}/inductor"
        assert environment.ask("__call__", "AMPCOMPILE_CACHE_DIR") == f"{tmp_path}/ampcompile"
    assert dict(os.environ) == before


def test_failures_are_told_and_survived(tmp_path: Path) -> None:
    with apart(Counter, 1, caches=tmp_path) as counter:
        with pytest.raises(FailedError, match=r"^ValueError: not today$"):
            counter.ask("fail")
        assert counter.ask("add", 1) == 2
        for _ in range(2):
            with pytest.raises(FailedError, match="its process died"):
                counter.ask("die")


def test_a_process_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with apart(Counter, 1, caches=tmp_path) as counter:
        counter.ask("add", 0)
        monkeypatch.setattr(module, "PATIENCE", 0.2)
        monkeypatch.setattr(module, "LEAVE", 0.1)
        with pytest.raises(FailedError, match="no answer within 0"):
            counter.ask("hang")
