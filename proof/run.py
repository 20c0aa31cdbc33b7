"""Runs the groups of cases that have no verdict yet, each in a process that is replaced when it dies or hangs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.apart import Apart, FailedError, apart
from proof import part as parts
from proof.results import RESULTS, Failure, Results, Verdict, about, name_of, of_part, shard

GROUPS_PER_PROCESS = 200
"""Dynamo keeps some of each graph; so many later a new process begins."""


class Worker:
    """What stands in the other process."""

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
    found.add_argument("parts", nargs="*", metavar="PART", help=f"which of {', '.join(parts.HOMES)}; all by default")
    found.add_argument("--all", action="store_true", help="every case, not the default sample")
    found.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="every N-th group, from the I-th on")
    found.add_argument("--minutes", type=float, default=60.0, help="stop after so many (default %(default)g)")
    found.add_argument("--again", action="store_true", help="forget the verdicts that are there")
    found.add_argument("--only", default="", help="groups whose names contain this; their verdicts are replaced")
    found.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default %(default)s)")
    return found


def main(arguments: list[str]) -> int:
    """Run what is asked for; 1 if something is left for another run."""
    options = parser().parse_args(arguments)
    if unknown := set(options.parts) - set(parts.HOMES):
        parser().error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts.HOMES)}")
    console, end = Console(stderr=True), monotonic() + 60 * options.minutes
    left = 0
    with TemporaryDirectory() as caches, contextlib.closing(Workers(Path(caches))) as workers:
        for name in options.parts or parts.HOMES:
            results = Results.load(options.results / name_of(name, options.shard))
            if options.again:
                results.path.unlink(missing_ok=True)
                results = Results(results.path)
            groups = _left(name, options)
            if groups:
                results.begin(about())
            left += _run(name, groups, results, workers, end, console)
    console.print(
        f"{left} groups left: the same command goes on with them" if left else "nothing is left", markup=False
    )
    return 1 if left else 0


def _left(name: str, options: argparse.Namespace) -> list[str]:
    """In an order in which whatever is done when time is up is a fair sample."""
    index, count = options.shard
    groups = sorted(parts.part(name).groups(options.all), key=lambda group: hashlib.sha256(group.encode()).digest())
    groups = groups[index - 1 :: count]
    if options.only:
        return [group for group in groups if options.only in group]
    done = {group for each in of_part(name, options.results) for group in each.verdicts}
    return [group for group in groups if group not in done]


def _run(name: str, groups: list[str], results: Results, workers: Workers, end: float, console: Console) -> int:
    """How many groups the time left wasn't enough for."""
    seconds = parts.part(name).seconds
    with _progress(console) as progress:
        task = progress.add_task(name, total=len(groups))
        for done, group in enumerate(groups):
            if monotonic() > end:
                return len(groups) - done
            progress.update(task, description=f"{name}: {group}")
            verdict = workers.verdict(name, group, seconds)
            results.add(verdict)
            for failure in verdict.failures:
                progress.console.print(f"{group}: {failure.kind}: {failure.text[:200]}", markup=False, highlight=False)
            progress.advance(task)
    return 0


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:50.50}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
