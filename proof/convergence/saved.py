"""Train by amp with what backward keeps in 16 bits, and in 8."""

from collections.abc import Sequence
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch

import ampcompile
from ampcompile.passes.after import keep_in_8_bits
from benchmarks.tables import table
from proof.convergence.masters import DRAWS, MODELS, cell, distance, groups, take_steps
from proof.convergence.subjects import STEPS, SUBJECTS
from proof.part import Part
from proof.results import Failure, Verdict

HOWS = {"in 16 bits": None, 'in 8 bits, `saved="fp8"`': "fp8"}
"""The name of each way → the option `saved`."""
USUAL, NARROW = HOWS


def train(name: str, seed: int, saved: str | None, draws: int = DRAWS) -> tuple[float, int]:
    """The loss of a trained model on other data, in float32, and the bytes that a step kept for backward.

    Small values are kept in 8 bits too: these models have no others.
    """
    subject = SUBJECTS[name]
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model, options = subject.model(), dict[str, Any](lower=subject.lower, saved=saved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=subject.rate, fused=True)
    with patch.object(keep_in_8_bits, "least", 0):
        run = torch.compile(model, backend="amp", options=options)
        loss = take_steps(subject, seed, model, optimizer, optimizer, draws, run)[2]
        batch = subject.batches(torch.Generator().manual_seed(seed))[0]
        return loss, ampcompile.explain(model, **options)(*batch).saved_totals.backward


def run(group: str, draws: int = DRAWS) -> Verdict:
    """Both runs of one model and seed: where each ends, and what it keeps."""
    name, _, seed = group.partition(", seed ")
    runs = {how: list(train(name, int(seed), saved, draws)) for how, saved in HOWS.items()}
    less = runs[NARROW][1] < 0.8 * runs[USUAL][1]
    failures = [] if less else [Failure("bytes", f"8 bits keep {runs[NARROW][1]}, 16 bits {runs[USUAL][1]}")]
    return Verdict(group, {"runs": len(runs)} | ({} if less else {"fails": 1}), failures, runs)


def holds(apart: float, error: float) -> bool:
    """True if zero lies within two standard errors of the mean, or half a thousandth; both in thousandths."""
    return abs(apart) <= max(2 * error, 0.5)


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """A row for each model with two seeds at least."""
    rows = []
    for name in MODELS:
        runs = [verdict for verdict in verdicts if verdict.group.startswith(f"{name}, ")]
        if len(runs) > 1:
            share = mean(verdict.figures[NARROW][1] / verdict.figures[USUAL][1] for verdict in runs)
            shown = "yes" if holds(*distance(runs, NARROW, USUAL)) else "no"
            losses = (cell(runs, how, USUAL) for how in HOWS)
            rows.append([name, str(len(runs)), *losses, f"{share:.2f}", shown])
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
