"""Peers on the same work, each in a process with caches of its own, timed in turn; what is noted stays."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from ampcompile.timing import calls_in_a_round, take_turns
from benchmarks.apart import Apart, FailedError, apart
from benchmarks.candidate import Candidate
from benchmarks.peers import BASELINE, PEERS
from benchmarks.plans import Work
from benchmarks.records import Records

ROUND = 0.2
"""Seconds that a round of the fastest peer lasts, at least."""
FLOAT32_ERROR, WRONG_ERROR = 3e-5, 0.5
"""Relative errors of a call: below the first nothing ran in a 16-bit type, above the second the numbers are wrong."""
SHARED = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "4"}
"""The environment of peers that compile side by side."""
KERNELS = "AMPCOMPILE_CACHE_DIR"
BUILD = "from ampcompile.kernels import native; native.available()"
LOSSES_APART = 0.02
"""Of the first loss: two peers whose losses after some steps are further apart don't train the same way."""


class Race:
    """The peers of one work that still run, and why the others don't."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.out = {name: why for name in work.peers if (why := PEERS[name].say_unable())}
        self.running: dict[str, Apart] = {}
        self.figures: dict[str, dict[str, Any]] = {}

    def ask(self, names: Sequence[str], *question: Any) -> dict[str, Any]:
        """Answers, one peer after the other; one that fails is out."""
        return {name: found for name in names if (found := self._try(name, "ask", *question)) is not None}

    def await_prepared(self) -> None:
        """Take the figures of peers that were all told to prepare themselves, and leave out those that are unfair."""
        for name in list(self.running):
            if (found := self._try(name, "receive")) is not None:
                self.figures[name] = found
        of = BASELINE if BASELINE in self.figures else next(iter(self.figures), "")
        for name, figures in self.figures.items():
            if why := judge(figures, self.figures[of], PEERS[name].precision != "float32"):
                self.out[name] = why
                del self.running[name]

    def time(self, kind: str, rounds: int) -> dict[str, dict[str, Any]]:
        """Figures by peer, `seconds` a call in each round among them; every other round goes backwards."""
        one_call = self.ask(list(self.running), "begin", kind)
        if not one_call:
            return {}
        calls = calls_in_a_round(one_call, ROUND)
        times = take_turns(lambda name: self._try(name, "ask", "round", calls), one_call, rounds)
        ends = self.ask(list(times), "end")
        return {name: {"seconds": times[name], **self.figures[name], **end} for name, end in ends.items()}

    def _try(self, name: str, method: str, *question: Any) -> Any:
        try:
            return getattr(self.running[name], method)(*question)
        except FailedError as error:
            self.out[name] = str(error)
            del self.running[name]
            return None


def judge(figures: dict[str, Any], reference: dict[str, Any], low: bool) -> str:
    """Why a peer doesn't do the work that the others do; empty if it does."""
    if (error := figures.get("error")) is not None:
        if not error < WRONG_ERROR:
            return f"wrong numbers: relative error {error:.2g} against eager float32"
        if low and error < FLOAT32_ERROR:
            return f"ran in float32: relative error {error:.2g} against eager float32"
    elif not abs(figures["losses"][-1] - (other := reference["losses"][-1])) <= LOSSES_APART * reference["losses"][0]:
        return f"trains otherwise: loss {figures['losses'][-1]:.4g}, others {other:.4g}"
    return ""


@contextmanager
def enter(race: Race, device: str, caches: Path, patience: float, together: bool) -> Iterator[None]:
    """Start the processes of a race, and have all of them compile: `together`, or one after the other."""
    with ExitStack() as processes:
        for name in (name for name in race.work.peers if name not in race.out):
            folder = caches / re.sub(r"\W+", "-", f"{race.work.name} {race.work.kinds[0]} {name}")
            environment = {KERNELS: f"{caches}/kernels", **(SHARED if together else {})}
            started = apart(Candidate, race.work, name, device, caches=folder, environment=environment)
            peer = processes.enter_context(started)
            peer.patience = patience
            race.running[name] = peer
            peer.send("prepare")
            if not together:
                peer.line.poll(patience)
        yield


def run(
    groups: Sequence[Sequence[Work]],
    records: Records,
    device: str,
    caches: Path,
    rounds: int = 7,
    together: bool = False,
    until: float = math.inf,
) -> int:
    """Measure what the records lack, the works of a group side by side; returns how many works are left.

    `caches`: a folder for what is compiled. `until`: when, by `time.monotonic()`, no further group begins that would
    be cut off: one is taken to last as long as the longest before it, or two minutes.
    """
    longest, left = 120.0, 0
    # Our C++ kernels are built once, not by each process.
    subprocess.run([sys.executable, "-c", BUILD], env={**os.environ, KERNELS: f"{caches}/kernels"}, check=False)
    for group in groups:
        todo = [work for work in group if not is_noted(work, records)]
        began = monotonic()
        if todo and (left or began + longest > until):
            left += len(todo)
            continue
        with ExitStack() as open_races:
            races = [Race(work) for work in todo]
            for race in races:
                open_races.enter_context(enter(race, device, caches, min(1800.0, until - began), together))
            for race in races:
                race.await_prepared()
            for race in races:
                for kind in race.work.kinds:
                    timed = race.time(kind, rounds)
                    for name in race.work.peers:
                        figures = timed.get(name) or {"why": race.out[name]}
                        records.add(name_stage(race.work, kind), name, **figures)
                    print(name_stage(race.work, kind), {n: min(f["seconds"]) for n, f in timed.items()}, flush=True)
        longest = max(longest, monotonic() - began) if todo else longest
    return left


def is_noted(work: Work, records: Records) -> bool:
    """True if the records hold every peer of a work in each of its kinds."""
    return all({*work.peers} <= records.stages.get(name_stage(work, kind), {}).keys() for kind in work.kinds)


def name_stage(work: Work, kind: str) -> str:
    """The stage of the records that holds a work's figures."""
    return f"{work.name}: {kind}"
