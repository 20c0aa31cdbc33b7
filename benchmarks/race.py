"""Peers on the same work: each in a process with empty caches of its own, timed in turn."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from benchmarks.apart import Apart, FailedError, apart
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
    """The peers that still run, and why the others don't."""

    def __init__(self, work: Work, device: str, caches: Caches) -> None:
        self.work, self.device, self.caches = work, device, caches
        self.running: dict[str, Apart] = {}
        self.out: dict[str, str] = {}

    def start(self, processes: ExitStack) -> dict[str, dict[str, Any]]:
        """Prepare one peer after the other; what each says of itself."""
        figures = {}
        for name in self.work.peers:
            if why := PEERS[name].unable(self.device):
                self.out[name] = why
                continue
            caches = processes.enter_context(self.caches())
            candidate = apart(
                Candidate, self.work, PEERS[name], self.device, caches=caches, environment=self.work.environment
            )
            self.running[name] = processes.enter_context(candidate)
            if self.work.isa:
                self.running[name].patience = EMULATED
            figures[name] = self.ask(name, "prepare")
        return figures

    def ask(self, name: str, *question: Any) -> Any:
        """One peer's answer; None if it fails, and then it is out."""
        try:
            return self.running[name].ask(*question)
        except FailedError as error:
            self.out[name] = str(error)
            del self.running[name]
            return None

    def ask_all(self, *question: Any, backwards: bool = False) -> dict[str, Any]:
        """Every peer's answer, one peer after the other."""
        names = list(self.running)[:: -1 if backwards else 1]
        answers = {name: self.ask(name, *question) for name in names}
        return {name: answer for name, answer in answers.items() if name in self.running}

    def time(self, case: str, budget: float) -> dict[str, list[float]]:
        """Seconds a call in each round, by peer; every other round goes backwards. Takes `budget` seconds or so."""
        one_call = self.ask_all("begin", case)
        if not one_call:
            return {}
        calls = math.ceil(ROUND / min(one_call.values()))
        one_round = calls * sum(one_call.values())
        fewest = ROUNDS[0] if one_round < SLOW_ROUND else FEW_ROUNDS
        rounds = min(max(int(budget / one_round), fewest), ROUNDS[1])
        times = [self.ask_all("round", calls, backwards=turn % 2 == 1) for turn in range(rounds)]
        return {name: [seconds[name] for seconds in times] for name in self.running}


def race(work: Work, device: str, budget: float, caches: Caches) -> list[Row]:
    """A row for every case of the work and every peer.

    `budget`: about how many seconds one case is timed. `caches` makes a folder for what one peer compiles.
    """
    rows = []
    with ExitStack() as processes:
        contest = Race(work, device, caches)
        figures = contest.start(processes)
        for case, _ in work.cases():
            times = contest.time(case, budget)
            ends = contest.ask_all("end")
            rows += [Row(case, name, {"seconds": times[name], **figures[name], **end}) for name, end in ends.items()]
            rows += [Row(case, name, why=why) for name, why in contest.out.items()]
    return rows
