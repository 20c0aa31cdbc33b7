"""Runs the groups of cases that have no verdict yet, each in a process that is replaced when it dies or hangs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import runner
from benchmarks.apart import Apart, FailedError, apart
from proof import part as parts
from proof.results import RESULTS, Failure, Verdict, name_of, of_part, opened, shard, verdicts

GROUPS_PER_PROCESS = 200
"""Dynamo keeps some of each graph; so many later a new process begins."""


class Worker:
    """Judges groups of cases in the other process."""

    def run(self, name: str, group: str) -> Verdict:
        """A group's verdict; what torch and amp warn of on the way is no part of it."""
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
        return parts.part(name).run(group)


class Workers:
    """One process at a time, made when there is work."""

    def __init__(self, caches: Path) -> None:
        self.caches, self.open, self.served = caches, contextlib.ExitStack(), 0
        self.process: Apart | None = None

    def verdict(self, name: str, group: str, seconds: float) -> Verdict:
        """A group's verdict; a process that dies or hangs is one too."""
        if self.served >= GROUPS_PER_PROCESS:
            self.close()
        self.served += 1
        if self.process is None:
            self.process = self.open.enter_context(
                apart(Worker, caches=self.caches, environment={"OMP_NUM_THREADS": "1"})
            )
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


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    found = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    found.add_argument("parts", nargs="*", metavar="PART", help=f"which of {', '.join(parts.HOMES)}")
    found.add_argument("--all", action="store_true", help="every case, not the default sample")
    found.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="every N-th group, from the I-th on")
    found.add_argument("--minutes", type=float, default=60.0, help="stop after so many (default %(default)g)")
    found.add_argument("--again", action="store_true", help="forget the verdicts that are there")
    found.add_argument("--only", default="", help="groups whose names contain this; their verdicts are replaced")
    found.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default %(default)s)")
    return found


def main(arguments: list[str]) -> int:
    """Run what is asked for; 1 if something is left for another run, 2 if something is missing."""
    options = parser().parse_args(arguments)
    if unknown := set(options.parts) - set(parts.HOMES):
        parser().error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts.HOMES)}")
    names = options.parts or [name for name in parts.HOMES if name not in parts.BY_NAME_ALONE]
    if missing := [why for name in names if (why := parts.part(name).missing())]:
        print(*missing, sep="\n", file=sys.stderr)
        return 2
    with TemporaryDirectory() as caches, contextlib.closing(Workers(Path(caches))) as workers:
        left = runner.run([job for name in names for job in _jobs(name, options, workers)], options.minutes)
    print(f"{left} groups left: the same command goes on with them" if left else "nothing is left")
    return 1 if left else 0


def _jobs(name: str, options: argparse.Namespace, workers: Workers) -> Iterator[runner.Job]:
    """In an order in which whatever is done when time is up is a fair sample."""
    path, part, (index, count) = options.results / name_of(name, options.shard), parts.part(name), options.shard
    if options.again:
        path.unlink(missing_ok=True)
    groups = sorted(part.groups(options.all), key=lambda group: hashlib.sha256(group.encode()).digest())
    done = {verdict.group for verdict in verdicts(of_part(name, options.results))} if not options.only else set()
    left = [group for group in groups[index - 1 :: count] if options.only in group and group not in done]
    records = opened(path, part.about() if left else None)
    for group in left:
        yield runner.Job(records, *Verdict(group).place, partial(_tried, workers, name, group, part.seconds))


def _tried(workers: Workers, name: str, group: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
    verdict = workers.verdict(name, group, seconds)
    return verdict.noted(), [f"{failure.kind}: {failure.text[:200]}" for failure in verdict.failures]
