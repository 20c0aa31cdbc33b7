"""Runs the groups of cases that have no verdict yet, each in a process that is replaced when it dies or hangs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.apart import Apart, FailedError, apart
from benchmarks.records import Records
from proof import part as parts
from proof.results import RESULTS, Failure, Verdict, about, find_records, name_file, open_records, read_verdicts, shard

GROUPS_PER_PROCESS = 200
"""Dynamo keeps some of each graph; so many later a new process begins."""


class Worker:
    """Judges groups of cases in the other process."""

    def run(self, name: str, group: str) -> Verdict:
        """A group's verdict; what torch and amp warn of on the way is no part of it."""
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
        return parts.load_part(name).run(group)


class Workers:
    """One process at a time, made when there is work."""

    def __init__(self, caches: Path) -> None:
        self.caches, self.open, self.served = caches, contextlib.ExitStack(), 0
        self.process: Apart | None = None

    def judge(self, name: str, group: str, seconds: float) -> Verdict:
        """A group's verdict; a process that dies or hangs is one too."""
        if self.served >= GROUPS_PER_PROCESS:
            self.close()
        self.served += 1
        if self.process is None:
            started = apart(Worker, caches=self.caches, environment={"OMP_NUM_THREADS": "1"})
            self.process = self.open.enter_context(started)
        self.process.patience = seconds
        try:
            return self.process.ask("run", name, group)
        except FailedError as error:
            self.close()
            return Verdict(group, {"fails": 1}, [Failure("process", str(error))])

    def close(self) -> None:
        """End the process."""
        self.open.close()
        self.process, self.served = None, 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of a run."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which of {', '.join(parts.HOMES)}")
    parser.add_argument("--all", action="store_true", help="every case, not the default sample")
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="every N-th group, from the I-th on")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many (default %(default)g)")
    parser.add_argument("--again", action="store_true", help="forget the verdicts that are there")
    parser.add_argument("--only", default="", help="groups whose names contain this; their verdicts are replaced")
    parser.add_argument("--show", action="store_true", help="run nothing, print the results that are there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default %(default)s)")
    found = parser.parse_args(arguments)
    if unknown := set(found.parts) - set(parts.HOMES):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts.HOMES)}")
    found.parts = found.parts or list(parts.HOMES)
    return found


def run(options: argparse.Namespace) -> int:
    """Run what is asked for, print each verdict; returns how many groups are left for another run."""
    left = [job for name in options.parts for job in _find_jobs(name, options)]
    try:
        with (
            TemporaryDirectory() as caches,
            contextlib.closing(Workers(Path(caches))) as workers,
            limit_time(60 * options.minutes),
        ):
            while left:
                records, name, group = left[0]
                verdict = workers.judge(name, group, parts.load_part(name).seconds)
                records.add(*verdict.place, **verdict.noted())
                told = [f"{failure.kind}: {failure.text[:200]}" for failure in verdict.failures]
                print(f"{name}: {group}", *told, sep="\n  ", flush=True)
                left.pop(0)
    except OutOfTimeError:
        print("out of time")
    return len(left)


def _find_jobs(name: str, options: argparse.Namespace) -> Iterator[tuple[Records, str, str]]:
    """In an order in which whatever is done when time is up is a fair sample."""
    path, (index, count) = options.results / name_file(name, options.shard), options.shard
    if options.again:
        path.unlink(missing_ok=True)
    groups = sorted(
        parts.load_part(name).groups(options.all), key=lambda group: hashlib.sha256(group.encode()).digest()
    )
    done = set() if options.only else {v.group for v in read_verdicts(find_records(name, options.results))}
    left = [group for group in groups[index - 1 :: count] if options.only in group and group not in done]
    records = open_records(path, about() if left else None)
    return ((records, name, group) for group in left)


class OutOfTimeError(BaseException):
    """The time for this run is over. No failure of a case's: nothing but the run itself catches it."""


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError meanwhile, after so many seconds (0: never), or where the process is asked to end."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGALRM)]
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)
