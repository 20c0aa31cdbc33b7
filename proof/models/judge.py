"""Compare a model under amp with eager autocast, also after its weights changed, and count its graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import process_time
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from proof.models.subject import Case, Inputs, Run, Subject
from proof.models.tally import Tally
from proof.ops.calls import amp, autocast, stock
from proof.ops.compare import Difference
from proof.ops.judge import FAILS, RAISES, STOCK_FAILS, find_refusals
from proof.results import Failure, Verdict

DRAWS = (2, 6, 18)
"""Inputs of which errors are averaged: more where fewer say that ours are larger, so that chance gives no verdict."""


class Way(NamedTuple):
    """How a model is compiled and called."""

    compile: Callable[[Any], Any]
    around: Callable[[], AbstractContextManager]


def ours(low: torch.dtype, lower: str) -> Way:
    """By amp, without an ambient autocast."""
    return Way(amp(lower=lower, dtype=low, outputs="autocast"), nullcontext)


def stocks(low: torch.dtype, lower: str) -> Way:
    """By torch, under autocast."""
    return Way(stock(lower), lambda: autocast(low))


class Attempt:
    """A model compiled in one way, held against eager autocast."""

    def __init__(self, case: Case, mode: str, low: torch.dtype, way: Way) -> None:
        torch.manual_seed(0)
        self.subject, self.low, self.way = Subject(case, mode), low, way
        self.compiled = way.compile(self.subject.model)
        self.graphs, self.seconds = 0, 0.0
        self.same, self.draws = True, 0

    def first(self) -> tuple[()]:
        """Compile and run it once; keep how many seconds of a core that took, and how many graphs it became."""
        inputs, begin = self.subject.case.inputs(), process_time()
        self.run(inputs)
        self.seconds = round(process_time() - begin, 3)
        self.graphs = counters["stats"]["unique_graphs"]
        return ()

    def run(self, inputs: Inputs) -> Run:
        """Once, compiled."""
        return self.subject.run(self.compiled, inputs, self.way.around())

    def eager(self, inputs: Inputs) -> Run:
        """Once, by eager autocast."""
        return self.subject.run(self.subject.model, inputs, autocast(self.low))

    def differences(self) -> Iterator[Difference]:
        """The differences: at once, after a step, after writes through `.data`."""
        self.first()
        zeros = ""
        for kind, change, least in (
            ("values", lambda: None, DRAWS[0]),
            ("stale after a step", self.subject.step, 1),
            ("stale after .data", self.subject.write_data, 1),
        ):
            change()
            tally = self.hold(least)
            zeros = zeros or tally.zeros
            if tally.dtypes or tally.worse():
                yield Difference("dtypes", tally.dtypes) if tally.dtypes else Difference(kind, tally.worse())
                break
        if zeros:
            yield Difference("zeros", zeros)

    def hold(self, least: int) -> Tally:
        """Check at least so many inputs, with these weights."""
        tally, done = Tally(), 0
        for count in (least, *DRAWS[1:]):
            for _ in range(done, count):
                self.draws += 1
                torch.manual_seed(self.draws)
                inputs = self.subject.case.inputs()
                tally.add(self.run(inputs), self.eager(inputs), self.subject.exact(inputs))
            done = count
            if tally.dtypes or not tally.worse():
                break
        self.same = self.same and tally.same
        return tally


def try_out(act: Callable[[], Iterable[Difference]]) -> list[Difference]:
    """Return the differences that `act` finds; to raise is one, and so is a graph that the backend refused."""
    torch._dynamo.reset()
    counters.clear()
    found: list[Difference] = []
    try:
        found += act()
    except Exception as error:
        found.append(Difference("raises", f"{type(error).__name__}: {str(error).strip()[:200]}"))
    return found + find_refusals()


def judge_differences(group: str, found: Sequence[Difference], there: Sequence[Difference]) -> Verdict:
    """Of what is wrong, and what is wrong with stock; where that raises, nobody knows what else would be."""
    kinds = {difference.kind for difference in there}
    failures = [Failure(kind, text, kind in kinds or "raises" in kinds) for kind, text in found]
    return Verdict(group, {STOCK_FAILS if all(failure.stock for failure in failures) else FAILS: 1}, failures)


def judge(group: str, case: Case, mode: str, low: torch.dtype, lower: str) -> Verdict:
    """The verdict on a case in one mode and one type."""
    eager = Attempt(case, mode, low, ours(low, lower))
    try:
        eager.eager(case.inputs())
    except Exception:
        return Verdict(group, {RAISES: 1})
    theirs, mine = (Attempt(case, mode, low, way(low, lower)) for way in (stocks, ours))
    there = try_out(theirs.first)
    found = try_out(mine.differences)
    if not there and mine.graphs > theirs.graphs:
        found.append(Difference("graphs", f"{mine.graphs} graphs; stock {theirs.graphs}"))
    if found:
        again = Attempt(case, mode, low, stocks(low, lower))
        verdict = judge_differences(group, found, try_out(again.differences))
    else:
        verdict = Verdict(group, {"same bits" if mine.same else "as near": 1})
    return dataclasses.replace(verdict, figures={"compile": [mine.seconds], "stock": [theirs.seconds]})
