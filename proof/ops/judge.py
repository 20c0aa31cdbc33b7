"""Compare a call under amp with eager autocast; where they differ, stock AOTAutograd with eager autocast."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from proof.ops.calls import Call, Run, amp, autocast, eager, stock
from proof.ops.compare import Difference, differences, same_numbers
from proof.results import Failure, Verdict

REFUSED = "Backend compiler `"
"""How Dynamo's reason for a graph break begins where a backend raised and it runs the frame as it is."""
RAISES, STOCK_FAILS, FAILS = "eager autocast raises", "stock fails too", "fails"


class Setting(NamedTuple):
    """How a call is run. `ambient`: inside an autocast, else with `outputs="autocast"`."""

    low: torch.dtype
    ambient: bool
    gradients: bool
    lower: str = "aot_eager"

    def __str__(self) -> str:
        where = "inside autocast" if self.ambient else 'outputs="autocast"'
        return f"{str(self.low).removeprefix('torch.')}, {where}, {'gradients' if self.gradients else 'forward'}"

    def around(self) -> AbstractContextManager:
        """The context in which amp's callable runs."""
        return autocast(self.low) if self.ambient else nullcontext()

    def amp(self) -> Callable[[Any], Any]:
        """How amp compiles it."""
        dtype = {} if self.ambient else {"dtype": self.low}
        return amp(lower=self.lower, outputs="autocast", **dtype)

    def stock(self) -> Callable[[Any], Any]:
        """How torch compiles it."""
        return stock(self.lower)


def verdict(group: str, judged: Iterable[tuple[int, tuple[str, list[Failure]]]]) -> Verdict:
    """Of a group of calls, by their places; failures of one kind are told once, by the first."""
    counts: Counter[str] = Counter()
    failures: dict[tuple[str, bool], Failure] = {}
    for place, (outcome, found) in judged:
        counts[outcome] += 1
        for failure in found:
            key = failure.kind, failure.stock
            first = failures.get(key) or failure._replace(text=f"sample {place}: {failure.text}", times=0)
            failures[key] = first._replace(times=first.times + 1)
    return Verdict(group, dict(counts), list(failures.values()))


def judge(call: Call, setting: Setting, unwritten: bool) -> tuple[str, list[Failure]]:
    """In one word what became of a call, and what is wrong with it.

    `unwritten`: it gives out memory that nobody wrote.
    """
    try:
        theirs = call.run(eager, autocast(setting.low), setting.gradients)
    except Exception:
        return RAISES, []
    random = unwritten or not same_numbers(theirs, call.run(eager, autocast(setting.low), setting.gradients, seed=1))
    exact = run_in_float64(call, setting.gradients)
    compare = lambda run: differences(run, theirs, exact, random)
    ours, found = attempt(call, setting.amp(), setting.around(), setting.gradients, compare)
    if not found:
        assert ours is not None
        return "random" if random else "same bits" if same_numbers(ours, theirs) else "as near", []
    _, torchs = attempt(call, setting.stock(), autocast(setting.low), setting.gradients, compare)
    kinds = {difference.kind for difference in torchs}
    failures = [Failure(kind, text, kind in kinds) for kind, text in found]
    return STOCK_FAILS if all(failure.stock for failure in failures) else FAILS, failures


def run_in_float64(call: Call, gradients: bool) -> Run | None:
    """The call without autocast in float64, or in float32 if there is no kernel for that."""
    for wide in (call.in_double(), call):
        try:
            return wide.run(eager, nullcontext(), gradients)
        except Exception:
            continue
    return None


def attempt(
    call: Call,
    how: Callable[[Any], Any],
    around: AbstractContextManager,
    gradients: bool,
    compare: Callable[[Run], list[Difference]],
) -> tuple[Run | None, list[Difference]]:
    """Compile and run a call; to raise is a difference, and so is a graph that the backend refused."""
    torch._dynamo.reset()
    counters.clear()
    try:
        run = call.run(how, around, gradients)
    except Exception as error:
        return None, [Difference("raises", f"{type(error).__name__}: {str(error).strip()[:200]}")]
    return run, compare(run) + find_refusals()


def find_refusals() -> list[Difference]:
    """The first graph that the backend refused since counters were cleared, if there is one."""
    refused = [reason for reason in counters["unimplemented"] if REFUSED in reason][:1]
    return [Difference("refused", text.partition(REFUSED)[2].splitlines()[0].replace("`", "")) for text in refused]
