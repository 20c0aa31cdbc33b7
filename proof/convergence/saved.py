"""Train by amp with what backward keeps in 16 bits, and in 8."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import torch

import ampcompile
from ampcompile.passes.after import keep_in_8_bits
from benchmarks.tables import table
from proof.convergence.subjects import STEPS, SUBJECTS
from proof.part import Part
from proof.results import Failure, Verdict

MODELS = ("GPT", "UNet")
SEEDS = 5
DRAWS = 6
"""Of a subject's batches; one more to see what was learned."""
HOWS = {"in 16 bits": None, 'in 8 bits, `saved="fp8"`': "fp8"}
"""The name of each way → the option `saved`."""
USUAL, NARROW = HOWS
APART = 0.5e-3
"""A mean difference that is allowed even where its standard error is less than half of it."""


def train(name: str, seed: int, saved: str | None, draws: int = DRAWS) -> tuple[float, int]:
    """The loss of a trained model on other data, in float32, and the bytes that each step kept for backward.

    The learning rate falls to 0 in a line. Small values are kept in 8 bits too: these models have no others.
    """
    subject = SUBJECTS[name]
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model, draw = subject.model(), torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"lower": subject.lower, "saved": saved}
    run = torch.compile(model, backend="amp", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=subject.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, draws * STEPS)
    with patch.object(keep_in_8_bits, "least", 0):
        for _ in range(draws):
            for batch in subject.batches(draw):
                loss = run(*batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            others = subject.batches(draw)
            end = mean(model(*batch).item() for batch in others)
        return end, ampcompile.explain(model, **options)(*others[0]).saved_totals.backward


def groups(everything: bool) -> list[str]:
    """The models, each with its seeds."""
    return [f"{name}, seed {seed}" for seed in range(SEEDS) for name in MODELS]


def run(group: str, draws: int = DRAWS) -> Verdict:
    """Both runs of one model and seed: where each ends, and what it keeps."""
    name, _, seed = group.partition(", seed ")
    runs = {how: list(train(name, int(seed), saved, draws)) for how, saved in HOWS.items()}
    less = runs[NARROW][1] < 0.8 * runs[USUAL][1]
    failures = [] if less else [Failure("bytes", f"8 bits keep {runs[NARROW][1]}, 16 bits {runs[USUAL][1]}")]
    return Verdict(group, {"runs": len(runs)} | ({} if less else {"fails": 1}), failures, runs)


def differences(verdicts: Sequence[Verdict], name: str) -> list[float]:
    """How far 8 bits end from 16, seed by seed."""
    return [v.figures[NARROW][0] - v.figures[USUAL][0] for v in verdicts if v.group.startswith(f"{name}, ")]


def holds(apart: Sequence[float]) -> bool:
    """True if zero lies within two standard errors of the mean, or half a thousandth."""
    return abs(mean(apart)) <= max(2 * stdev(apart) / sqrt(len(apart)), APART)


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """A row for each model with two seeds at least."""
    rows = []
    for name in MODELS:
        runs = [v.figures for v in verdicts if v.group.startswith(f"{name}, ")]
        if len(apart := differences(verdicts, name)) > 1:
            error = stdev(apart) / sqrt(len(apart))
            loss, share = mean(r[USUAL][0] for r in runs), mean(r[NARROW][1] / r[USUAL][1] for r in runs)
            shown = f"{1e3 * mean(apart):+.2f} ± {1e3 * error:.2f}"
            rows.append([name, str(len(runs)), f"{loss:.4f}", shown, f"{share:.2f}", "yes" if holds(apart) else "no"])
    return table(["", "seeds", "loss with 16 bits", "with 8", "bytes kept", "holds"], rows)


PART = Part(
    "What backward keeps, in 8 bits",
    f"""A small GPT and a UNet train by amp in bfloat16 and AdamW for {DRAWS * STEPS} steps on the made-up data of
convergence: once as usual, once with `saved="fp8"`, where values of any size are kept in 8 bits. The loss is that of
the trained weights on other data, computed in float32. The difference is in thousandths, with the same initial weights
and batches, and the standard error of its mean. It holds if zero lies within two standard errors, or half a thousandth.
""",
    groups,
    run,
    tabulate,
    seconds=900.0,
)
