"""An object in another process: its answers, its failures, its caches."""

import os
import subprocess
import sys
import time
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

    def dawdle(self) -> None:
        time.sleep(0.5)

    def start_worker(self) -> int:
        """A process of its own, as compilers start some; its id."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


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


def test_a_process_that_hangs_is_given_up(tmp_path: Path) -> None:
    with apart(Counter, 1, caches=tmp_path) as counter:
        counter.ask("add", 0)
        worker = counter.ask("start_worker")
        counter.patience = 0.2
        with pytest.raises(FailedError, match="no answer within 0"):
            counter.ask("hang")
        assert not counter.process.is_alive(), "nor does it compile beside the others"
        assert ended(worker), "and so have the processes that it started"
        with pytest.raises(FailedError, match="its process died"):
            counter.ask("add", 1)


def test_an_answer_that_nobody_waits_for_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with apart(Counter, 1, caches=tmp_path) as counter:
        counter.ask("add", 0)
        counter.line.send(("dawdle", ()))
    assert counter.process.exitcode == 0 and "BrokenPipe" not in capfd.readouterr().err


def ended(process: int) -> bool:
    """Whether a process of another's is gone, or waits for somebody to notice."""
    for _ in range(50):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_whoever_is_interrupted_waits_for_nobody(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), apart(Counter, 1, caches=tmp_path) as counter:
        counter.ask("add", 0)
        counter.line.send(("hang", ()))
        started = time.perf_counter()
        raise KeyboardInterrupt
    assert time.perf_counter() - started < module.LEAVE / 2 and not counter.process.is_alive()
