"""Random programs in blocks, each a group of its own, named by kind and first seed."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch

from proof.fuzz.beside_stock import REFUSED, Setting
from proof.fuzz.training import Beside
from proof.page import outcomes
from proof.part import Part
from proof.results import Failure, Verdict

HALF = torch.float16
PROGRAMS = 25
"""In a group."""
KINDS: dict[str, Setting | Beside] = {
    "modules": Setting(),
    "modules, float16": Setting(dtype=HALF),
    "modules, results in float32": Setting(outputs="float32"),
    "modules, any number of rows": Setting(dynamic=True),
    "modules, graphs as they are": Setting(lower="eager"),
    "modules, Inductor": Setting(lower="inductor"),
    "training": Beside(),
    "training, float16": Beside(HALF, late=False),
}
GROUPS = {"modules, Inductor": (0, 4), "training": (4, 40), "training, float16": (4, 40)}
"""How many of a kind, and how many of everything."""
FEW_OR_ALL = 2, 20


def groups(everything: bool) -> list[str]:
    """Blocks of seeds of each kind."""
    return [
        f"{kind}, {PROGRAMS * block} on" for kind in KINDS for block in range(GROUPS.get(kind, FEW_OR_ALL)[everything])
    ]


def run(group: str) -> Verdict:
    """A block of programs. Training shares compiled code from program to program, as models of one class do."""
    kind, _, text = group.rpartition(", ")
    first = int(text.removesuffix(" on"))
    counts: Counter[str] = Counter()
    failures = []
    torch._dynamo.reset()
    with shared_code():
        for seed in range(first, first + PROGRAMS):
            outcome, found = judged(kind, seed)
            counts[outcome] += 1
            failures += [Failure(word, f"`python -m proof.fuzz '{kind}' {seed}`: {text}") for word, text in found]
    return Verdict(group, dict(counts), failures)


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """Outcomes by kind."""
    rows: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for verdict in verdicts:
        rows[verdict.group.rpartition(", ")[0]].update(verdict.counts)
    return outcomes({kind: row for kind, row in rows.items() if row}, ["same bits", "as near", "fails", REFUSED])


def judged(kind: str, seed: int) -> tuple[str, list[tuple[str, str]]]:
    """The verdict on a seed's program."""
    how = KINDS[kind]
    return how.judge(how.program(seed))  # type: ignore[arg-type]


def shared_code() -> AbstractContextManager:
    """While it is open, without a limit to how many models one compiled function serves."""
    return patch.multiple("torch._dynamo.config", recompile_limit=10_000, accumulated_recompile_limit=10_000)


PART = Part(
    "Random programs",
    """Drawn by seeds, so that `python -m proof.fuzz KIND SEED` repeats one, and makes it shorter if it fails.

Modules compute with shared weights, one of them in a buffer's memory; with views and writes through them, slices
assigned, casts there and back, autocast regions, `no_grad`, checkpoints and graph breaks; and return results that
alias. Results, gradients, buffers and written inputs must have the dtypes and the shared memory of stock `aot_eager`
under autocast, and its bits or be as near to float64: at most 1.1 times as far.
Graphs that run as they are have eager autocast to compare with. What stock or eager autocast refuses isn't counted.

Training calls forward, backward and optimizers in any order, several losses waiting; evaluates, saves, loads and meets
errors of the user's in between; and writes weights in forty ways, through `.data`, `detach()`, aliases, the buffer
below, `foreach`, `copy_`, `set_`, swaps, NumPy, DLPack, storages and new parameters. After each statement all numbers
have the bits of a twin that casts its weights at every call; and three times in each program, outputs and gradients are
as near to float64 as eager autocast's of the same weights: at most 1.5 times as far.
In float16 no loss waits while a weight is written: on a CPU
without units for it, the twin's backward casts some weights again, which are other ones by then.
""",
    groups,
    run,
    tabulate,
    seconds=1200.0,
)
