"""Operators of several floating operands, where the first and the others arrive in different types."""

from collections.abc import Sequence

import torch

from proof.ops import chapter, database
from proof.ops.calls import Call, autocast, eager
from proof.ops.compare import Difference, Run, dense, too_far
from proof.ops.judge import FAILS, RAISES, Setting, attempt, in_float64, judge, verdict
from proof.results import Failure, Verdict

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
PAIRS = ("bf16 x f32", "f32 x bf16", "f16 x f32", "f32 x f16", "f64 x bf16", "bf16 x f64")
"""The type of the first operand, and that of the others."""


class Mixed:
    """Groups are `operator, pair`; their one call is the operator's first with several floating operands."""

    title = "Mixed operands"
    says = """The first call of each operator that has several floating operands, inside autocast and with gradients,
the first operand in one type and the others in another; autocast's own type is the one with 16 bits. Where eager
autocast raises, amp may raise too; if it runs, its results are as near to float64 as those of the same call with all
operands in 16 bits.
"""
    seconds = 300.0

    def groups(self, everything: bool) -> list[str]:
        """All pairs, always."""
        names = [name for name in database.operators() if _call(name) is not None]
        return [f"{name}, {pair}" for name in names for pair in PAIRS]

    def run(self, group: str) -> Verdict:
        """Inside autocast, with gradients; where eager autocast raises and ours doesn't, only the numbers count."""
        name, _, pair = group.partition(", ")
        call = _call(name)
        assert call is not None
        first, others = (TYPES[short] for short in pair.split(" x "))
        low = first if first.itemsize == 2 else others
        setting = Setting(low, ambient=True, gradients=True)
        mixed = call.in_dtypes([first] + [others] * (len(call.floats()) - 1))
        judged = judge(mixed, setting, name in database.UNWRITTEN)
        if judged[0] == RAISES and (uniform := _uniform(call, setting)) is not None:
            judged = _judge_alone(mixed, uniform, setting)
        return verdict(group, [(0, judged)])

    def tabulate(self, verdicts: Sequence[Verdict]) -> str:
        """Outcomes by pair."""
        return chapter.tabulate(verdicts)


def _call(name: str) -> Call | None:
    return next((call for call in database.samples(name, at_most=8) if len(call.floats()) > 1), None)


def _uniform(call: Call, setting: Setting) -> Run | None:
    """The call under eager autocast with all operands in its 16-bit type, if it runs and has no random numbers."""
    low = call.in_dtypes([setting.low] * len(call.floats()))
    try:
        runs = [low.run(eager, autocast(setting.low), False, seed) for seed in (0, 1)]
    except Exception:
        return None
    return runs[0] if too_far_from(runs[0], runs[1], runs[1]) == [] else None


def _judge_alone(mixed: Call, uniform: Run, setting: Setting) -> tuple[str, list[Failure]]:
    """Of a call that eager autocast refuses: ours may refuse it, or be as near as one without a mixture."""
    exact = in_float64(mixed, False)
    if exact is None:
        return RAISES, []
    ours, found = attempt(mixed, setting.amp(), setting.around(), False, lambda run: too_far_from(run, uniform, exact))
    if ours is None:
        return RAISES, []
    return (FAILS, [Failure(*each) for each in found]) if found else ("ours runs", [])


def too_far_from(run: Run, theirs: Run, exact: Run) -> list[Difference]:
    """Results further from float64 than another run's, whatever their types."""
    rows = zip(run.results, theirs.results, exact.results, strict=True)
    texts = [too_far(*map(dense, row)) for row in rows if all(isinstance(value, torch.Tensor) for value in row)]
    return [Difference("values", text) for text in texts if text]


PART = Mixed()
