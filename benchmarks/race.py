"""Peers on the same work: each in a process with empty caches of its own, timed in turn."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from benchmarks.apart import Asked, FailedError, apart
from benchmarks.candidate import Candidate
from benchmarks.peers import PEERS
from benchmarks.records import Row
from benchmarks.works import Work

Caches = Callable[[], AbstractContextManager[Path]]
ROUND = 0.1
"""Seconds that a round of the fastest peer lasts, at least."""
ROUNDS = (7, 25)
"""How many rounds there are, at least and at most."""
SLOW_ROUND = 10.0
"""Seconds that a round takes, at least, where a CPU emulates a type."""
EMULATED = 1800.0
"""Seconds that one answer may take on such a CPU."""
FEW_ROUNDS = 3
"""How many slow rounds there are, at least."""


class Race:
    """The peers that still run, and why the others don't. A round has `least` calls, at least."""

    def __init__(self, out: Mapping[str, str], least: int = 1) -> None:
        self.running: dict[str, Asked] = {}
        self.figures: dict[str, dict[str, Any]] = {}
        self.out, self.least = dict(out), least

    def enter(self, name: str, peer: Asked) -> None:
        """Let in a peer, which prepares itself before the next one comes."""
        self.running[name] = peer
        self.figures |= self._ask([name], "prepare")

    def prepared(self) -> None:
        """Wait for peers that were all told to prepare themselves."""
        for name, peer in list(self.running.items()):
            try:
                self.figures[name] = {key: value for key, value in peer.receive().items() if key != "compile_seconds"}
            except FailedError as error:
                self._fails(name, error)

    def ask_all(self, *question: Any, backwards: bool = False) -> dict[str, Any]:
        """Every peer's answer, one peer after the other."""
        return self._ask(list(self.running)[:: -1 if backwards else 1], *question)

    def _ask(self, names: Iterable[str], *question: Any) -> dict[str, Any]:
        """The answers of those that have one; one that fails is out."""
        answers = {}
        for name in names:
            try:
                answers[name] = self.running[name].ask(*question)
            except FailedError as error:
                self._fails(name, error)
        return answers

    def _fails(self, name: str, error: FailedError) -> None:
        self.out[name] = str(error)
        del self.running[name]

    def time(self, case: str, budget: float) -> dict[str, list[float]]:
        """Seconds a call in each round, by peer; every other round goes backwards. Takes `budget` seconds or so."""
        one_call = self.ask_all("begin", case)
        if not one_call:
            return {}
        calls = max(self.least, math.ceil(ROUND / min(one_call.values())))
        one_round = calls * sum(one_call.values())
        fewest = ROUNDS[0] if one_round < SLOW_ROUND else FEW_ROUNDS
        rounds = min(max(int(budget / one_round), fewest), ROUNDS[1])
        times = [self.ask_all("round", calls, backwards=turn % 2 == 1) for turn in range(rounds)]
        return {name: [seconds[name] for seconds in times] for name in self.running}

    def rows(self, cases: Iterable[str], budget: float = 0.0) -> list[Row]:
        """A row for every case and every peer. `budget`: about how many seconds one case is timed."""
        rows = []
        for case in cases:
            times, ends = self.time(case, budget), self.ask_all("end")
            rows += [
                Row(case, name, {"seconds": times[name], **self.figures[name], **end}) for name, end in ends.items()
            ]
            rows += [Row(case, name, why=why) for name, why in self.out.items()]
        return rows


def race(work: Work, device: str, budget: float, caches: Caches, together: bool = False) -> list[Row]:
    """A row for every case of the work and every peer; `caches` makes a folder for what one peer compiles.

    `together`: all peers prepare themselves at the same time; then nobody's compile time is known.
    """
    contest = Race({name: why for name in work.peers if (why := PEERS[name].unable(device))})
    with ExitStack() as processes:
        for name in (name for name in work.peers if name not in contest.out):
            folder, given = processes.enter_context(caches()), (work, PEERS[name], device)
            peer = processes.enter_context(apart(Candidate, *given, caches=folder, environment=work.environment))
            peer.patience = EMULATED if work.isa else peer.patience
            if together:
                peer.send("prepare")
                contest.running[name] = peer
            else:
                contest.enter(name, peer)
        if together:
            contest.prepared()
        return contest.rows([case for case, _ in work.cases()], budget)
