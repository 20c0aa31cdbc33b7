"""Does jobs one by one, keeps what each gives, and stops in time: what is left is for another run."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.records import Records


class Job(NamedTuple):
    """Something to be done whose result is a record."""

    records: Records
    stage: str
    name: str
    work: Callable[[], tuple[dict[str, Any], list[str]]]
    """Gives what `Records.add` notes, and what is said of it."""


def run(jobs: Sequence[Job], minutes: float = 0.0, prepare: Callable[[], object] = lambda: None) -> int:
    """Do the jobs in this order; how many are left when time is up (0 minutes: never) or the process is asked to end.

    What is done is on disk; a job that was cut off counts as left. `prepare` is called first, if there is a job.
    """
    left = list(jobs)
    try:
        with time_limit(60 * minutes):
            if left:
                prepare()
            while left:
                records, stage, name, work = left[0]
                content, told = work()
                records.add(stage, name, **content)
                print(": ".join(filter(None, (stage, name))), *told, sep="\n  ", flush=True)
                left.pop(0)
    except OutOfTimeError:
        print(f"out of time in {left[0].stage}: {left[0].name}" if left else "")
    return len(left)


class OutOfTimeError(BaseException):
    """The time for this run is over. No failure of a peer's: nothing but the run itself catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError meanwhile, after so many seconds (0: never), or where the process is asked to end."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    numbers = [signal.SIGTERM, *([signal.SIGALRM] if seconds else [])]
    before = [(number, signal.signal(number, stop)) for number in numbers]
    try:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # inside: the shortest limits end before it returns
        yield
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)
