"""Objects in processes of their own: their memory, caches and compilers' state are nobody else's."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

PATIENCE = 300.0
"""Seconds that one answer may take, unless the asker has more; compilation takes longest."""
LEAVE = 10.0
"""Seconds that a process has to end once nobody listens."""


class FailedError(Exception):
    """An error of the other process, in one line."""


class Apart:
    """An object in another process."""

    def __init__(self, line: Connection, process: BaseProcess) -> None:
        self.line, self.process, self.patience = line, process, PATIENCE

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method there. Raises FailedError if that raises, if the process dies, or after `patience` seconds:
        then the process is killed, so that it doesn't go on compiling beside the others.
        """
        self.send(method, *args)
        return self.receive()

    def send(self, method: str, *args: Any) -> None:
        """Have a method called there; `receive` returns what it gives."""
        with suppress(OSError):  # its process died: `receive` says so
            self.line.send((method, args))

    def receive(self) -> Any:
        """The answer to what was sent; raises FailedError as `ask` does."""
        try:
            if not self.line.poll(self.patience):
                self.kill()
                raise FailedError(f"no answer within {self.patience:.0f} s")
            answer, failure = self.line.recv()
        except (EOFError, OSError):
            raise FailedError("its process died") from None
        if failure:
            raise FailedError(failure)
        return answer

    def kill(self) -> None:
        """End the process and those that it started, as the workers of a compiler, at once."""
        if self.process.is_alive() and self.process.pid:
            with suppress(ProcessLookupError):  # it has begun, but leads no group yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()


@contextmanager
def apart(
    make: Callable[..., Any], *args: Any, caches: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Apart]:
    """`make(*args)` in a new process that keeps whatever it compiles in the folder `caches`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make, *args))
    folders = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "AMPCOMPILE_CACHE_DIR": f"{caches}/ampcompile"}
    with mock.patch.dict(os.environ, {**folders, **environment}):
        process.start()
    there.close()  # so that a process that died is noticed, not waited for
    other = Apart(here, process)
    try:
        yield other
        here.close()
        process.join(LEAVE)
    finally:
        here.close()
        other.kill()


def _serve(line: Connection, make: Callable[..., Any], *args: Any) -> None:
    os.setsid()  # a group of its own, which ends as a whole
    served = None
    while True:
        try:
            method, arguments = line.recv()
        except EOFError:  # nobody will ask again
            return
        try:
            served = served or make(*args)
            answer = getattr(served, method)(*arguments), ""
        except Exception as error:
            answer = None, in_one_line(error)
        with suppress(BrokenPipeError):  # nobody listens any more
            line.send(answer)


def in_one_line(error: Exception) -> str:
    """The first line of an exception's text."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
