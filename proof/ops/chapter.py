"""The op sweeps on the page."""

from collections import Counter
from collections.abc import Iterable

from proof.ops.judge import FAILS, RAISES, STOCK_FAILS
from proof.page import outcomes
from proof.results import Verdict

RULES = """A case is one call of one entry of torch's operator database, `op_db`, with float32 operands. It holds if

- amp's results and gradients have eager autocast's dtypes and shapes;
- in each of them the largest difference from a run in float64 is at most 1.1 times eager autocast's plus one ulp of the
  largest number; nothing is infinite or NaN that eager autocast and float64 have finite, or the other way round;
- results have eager's strides, and share memory with the same operands and results.

Of random numbers, and of memory that nobody wrote, all but the values count. What doesn't hold is tried on stock
`aot_eager` under autocast too.
"""


def tabulate(verdicts: Iterable[Verdict]) -> str:
    """Outcomes by setting, and the share that holds of those cases that eager autocast and stock AOTAutograd run."""
    rows: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        setting = verdict.group.partition(", ")[2].removesuffix(", rest")
        rows.setdefault(setting, Counter()).update(verdict.counts)
    total = sum(rows.values(), Counter())
    held = sum(total.values()) - total[RAISES] - total[STOCK_FAILS] - total[FAILS]
    share = f"{held / (held + total[FAILS]):.2%}" if held else "none"
    text = outcomes(
        dict(sorted(rows.items())), ["same bits", "as near", "random", "ours runs", STOCK_FAILS, FAILS, RAISES]
    )
    known = held + total[FAILS]
    return f"{text}\n{share} hold: {held} of {known} that eager autocast runs and stock AOTAutograd gets right.\n"
