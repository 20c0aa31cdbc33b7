"""Operators that write their first operand, which arrives in the same type as the others, or in another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from proof.ops import chapter, database
from proof.ops.calls import Call
from proof.ops.judge import Setting, judge, verdict
from proof.ops.mixed import TYPES
from proof.results import Verdict

PAIRS = ("f32 x f32", "bf16 x f32", "f32 x bf16", "f16 x f32", "f32 x f16")
"""The type of what is written, and that of the other operands."""


class InPlace:
    """Groups are `operator, pair`, of one call with gradients and one without."""

    title = "Operators in place"
    says = """Each operator that has a form which writes its first operand, inside autocast, by the same rules: that
operand, a copy of an input, in one type and the others in another.
"""
    seconds = 300.0

    def groups(self, everything: bool) -> list[str]:
        """All pairs, always."""
        names = [name for name, info in database.operators().items() if info.inplace_variant is not None]
        return [f"{name}, {pair}" for name in names for pair in PAIRS]

    def run(self, group: str) -> Verdict:
        """Inside autocast: of the pair's 16-bit type, or of bfloat16."""
        name, _, pair = group.partition(", ")
        first, others = (TYPES[short] for short in pair.split(" x "))
        low = next((dtype for dtype in (first, others) if dtype.itemsize == 2), torch.bfloat16)
        calls = ((place, _writing(name, call)) for place, call in database.drawn(name))
        typed = [(place, call.in_dtypes([first] + [others] * (len(call.floats()) - 1))) for place, call in calls]
        judged = (
            (place, judge(call, Setting(low, ambient=True, gradients=gradients), name in database.UNWRITTEN))
            for gradients, (place, call) in zip((True, False), typed, strict=False)
        )
        return verdict(group, judged)

    def tabulate(self, verdicts: Sequence[Verdict]) -> str:
        """Outcomes by pair."""
        return chapter.tabulate(verdicts)


def _writing(name: str, call: Call) -> Call:
    """The call in place, on a copy: of inputs autograd keeps what it needs."""
    write = database.operators()[name].inplace_variant

    def op(first: Any, *args: Any, **kwargs: Any) -> Any:
        return write(first.clone(), *args, **kwargs)

    return replace(call, op=op)


PART = InPlace()
