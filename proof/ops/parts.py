"""The op sweeps: torch's operators in float32, of mixed types, in place, and a sample as Inductor lowers them.

Groups are `operator, setting`, where the setting is how the call is run, or a pair of types.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ampcompile.dtypes import LOW
from proof.ops import database
from proof.ops.calls import Call, autocast, eager
from proof.ops.compare import Difference, Run, dense, too_far
from proof.ops.judge import FAILS, RAISES, STOCK_FAILS, Setting, attempt, judge, run_in_float64, verdict
from proof.part import Part
from proof.results import Failure, Verdict
from proof.show import share_held, tabulate_counts

SETTINGS = {str(s): s for s in itertools.starmap(Setting, itertools.product(LOW, (True, False), (True, False)))}
DEFAULT = {name for name, s in SETTINGS.items() if s.ambient == s.gradients}
"""Both places of a call and both modes, each pair of them once."""
REST = ", rest"
"""At the end of a group's name: the samples beyond the default ones."""
OPERATORS_LOWERED = 30
"""By Inductor, which takes seconds for one; of everything ten times as many."""
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
MIXED_PAIRS = ("bf16 x f32", "f32 x bf16", "f16 x f32", "f32 x f16", "f64 x bf16", "bf16 x f64")
"""The type of the first operand, and that of the others."""
WRITTEN_PAIRS = ("f32 x f32", "bf16 x f32", "f32 x bf16", "f16 x f32", "f32 x f16")
"""The type of what is written, and that of the other operands."""


def list_settings(everything: bool) -> list[str]:
    """Four settings of each operator, or all eight, and the rest of its samples."""
    settings, beyond = (SETTINGS, ("", REST)) if everything else (sorted(DEFAULT), ("",))
    return [f"{name}, {s}{rest}" for name in database.list_operators() for s in settings for rest in beyond]


def run_setting(group: str, lower: str = "aot_eager", at_most: int | None = None) -> Verdict:
    """Of the samples drawn, or of the rest."""
    name, _, text = group.partition(", ")
    setting, unwritten = SETTINGS[text.removesuffix(REST)]._replace(lower=lower), name in database.UNWRITTEN
    calls = itertools.islice(database.draw_calls(name, rest=text.endswith(REST)), at_most)
    return verdict(group, ((place, judge(call, setting, unwritten)) for place, call in calls))


def list_lowered(everything: bool) -> list[str]:
    """Operators drawn by a seed, the settings in turn."""
    count, settings = OPERATORS_LOWERED * (10 if everything else 1), sorted(DEFAULT)
    names = random.Random(0).sample(sorted(database.list_operators()), count)
    return [f"{name}, {settings[n % len(settings)]}" for n, name in enumerate(names)]


def list_mixed(everything: bool) -> list[str]:
    """All pairs, always."""
    return [f"{name}, {pair}" for name in database.list_operators() if _first(name) is not None for pair in MIXED_PAIRS]


def run_mixed(group: str) -> Verdict:
    """Inside autocast, with gradients; where eager autocast raises and ours doesn't, only the numbers count."""
    name, _, pair = group.partition(", ")
    call = _first(name)
    assert call is not None
    first, others = (TYPES[short] for short in pair.split(" x "))
    setting = Setting(first if first.itemsize == 2 else others, ambient=True, gradients=True)
    typed = _typed(call, first, others)
    judged = judge(typed, setting, name in database.UNWRITTEN)
    if judged[0] == RAISES and (uniform := _uniform(call, setting)) is not None:
        judged = _judge_alone(typed, uniform, setting)
    return verdict(group, [(0, judged)])


def list_in_place(everything: bool) -> list[str]:
    """All pairs, always."""
    names = [name for name, info in database.list_operators().items() if info.inplace_variant is not None]
    return [f"{name}, {pair}" for name in names for pair in WRITTEN_PAIRS]


def run_in_place(group: str) -> Verdict:
    """One call with gradients and one without, inside autocast: of the pair's 16-bit type, or of bfloat16."""
    name, _, pair = group.partition(", ")
    first, others = (TYPES[short] for short in pair.split(" x "))
    low = next((dtype for dtype in (first, others) if dtype.itemsize == 2), torch.bfloat16)
    calls = [(place, _typed(_writing(name, call), first, others)) for place, call in database.draw_calls(name)]
    judged = (
        (place, judge(call, Setting(low, ambient=True, gradients=gradients), name in database.UNWRITTEN))
        for gradients, (place, call) in zip((True, False), calls, strict=False)
    )
    return verdict(group, judged)


def _first(name: str) -> Call | None:
    """An operator's first call with several floating operands."""
    return next((call for call in database.make_calls(name, at_most=8) if len(call.floats()) > 1), None)


def _typed(call: Call, first: torch.dtype, others: torch.dtype) -> Call:
    return call.in_dtypes([first] + [others] * (len(call.floats()) - 1))


def _writing(name: str, call: Call) -> Call:
    """The call in place, on a copy: of inputs autograd keeps what it needs."""
    write = database.list_operators()[name].inplace_variant

    def op(first: Any, *args: Any, **kwargs: Any) -> Any:
        return write(first.clone(), *args, **kwargs)

    return replace(call, op=op)


def _uniform(call: Call, setting: Setting) -> Run | None:
    """The call under eager autocast with all operands in its 16-bit type, if it runs and has no random numbers."""
    low = _typed(call, setting.low, setting.low)
    try:
        runs = [low.run(eager, autocast(setting.low), False, seed) for seed in (0, 1)]
    except Exception:
        return None
    return runs[0] if compare_with_float64(runs[0], runs[1], runs[1]) == [] else None


def _judge_alone(mixed: Call, uniform: Run, setting: Setting) -> tuple[str, list[Failure]]:
    """Of a call that eager autocast refuses: ours may refuse it, or be as near as one without a mixture."""
    exact = run_in_float64(mixed, False)
    if exact is None:
        return RAISES, []
    ours, found = attempt(
        mixed, setting.amp(), setting.around(), False, lambda run: compare_with_float64(run, uniform, exact)
    )
    if ours is None:
        return RAISES, []
    return (FAILS, [Failure(*each) for each in found]) if found else ("ours runs", [])


def compare_with_float64(run: Run, theirs: Run, exact: Run) -> list[Difference]:
    """Results further from float64 than another run's, whatever their types."""
    rows = zip(run.results, theirs.results, exact.results, strict=True)
    texts = [too_far(*map(dense, row)) for row in rows if all(isinstance(value, torch.Tensor) for value in row)]
    return [Difference("values", text) for text in texts if text]


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """Outcomes by setting, and the share that holds of those cases that eager autocast and stock AOTAutograd run."""
    rows: dict[str, Counter[str]] = {}
    for each in verdicts:
        rows.setdefault(each.place[0].removesuffix(REST), Counter()).update(each.counts)
    columns = ["same bits", "as near", "random", "ours runs", STOCK_FAILS, FAILS, RAISES]
    total = sum(rows.values(), Counter())
    held = sum(total.values()) - total[RAISES] - total[STOCK_FAILS] - total[FAILS]
    return f"{tabulate_counts(dict(sorted(rows.items())), columns)}\n{share_held(held, total[FAILS])}\n"


_part = partial(Part, tabulate=tabulate)
OPERATORS = _part(
    "Operators",
    """A case is one call of one entry of torch's operator database, `op_db`, with float32 operands. It holds if

- amp's results and gradients have eager autocast's dtypes and shapes;
- in each of them the largest difference from a run in float64 is at most 1.1 times eager autocast's plus one ulp of the
  largest number; nothing is infinite or NaN that eager autocast and float64 have finite, or the other way round;
- results have eager's strides, and share memory with the same operands and results.

Of random numbers, and of memory that nobody wrote, all but the values count. What doesn't hold is tried on stock
`aot_eager` under autocast too.
""",
    list_settings,
    run_setting,
)
MIXED = _part(
    "Mixed operands",
    """The first call of each operator that has several floating operands, inside autocast and with gradients,
the first operand in one type and the others in another; autocast's own type is the one with 16 bits. Where eager
autocast raises, amp may raise too; if it runs, its results are as near to float64 as those of the same call with all
operands in 16 bits.
""",
    list_mixed,
    run_mixed,
    seconds=300.0,
)
IN_PLACE = _part(
    "Operators in place",
    """Each operator that has a form which writes its first operand, inside autocast, by the same rules: that
operand, a copy of an input, in one type and the others in another.
""",
    list_in_place,
    run_in_place,
    seconds=300.0,
)
INDUCTOR = _part(
    "Operators, by Inductor",
    """One call of operators drawn by a seed, by the same rules; "stock" is Inductor under autocast.
""",
    list_lowered,
    partial(run_setting, lower="inductor", at_most=1),
)
