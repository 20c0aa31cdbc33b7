"""Train by amp with what backward keeps in 16 bits and in 8; as a control in 8 whatever reads it."""

from collections.abc import Sequence
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampcompile
from ampcompile.passes.after import keep_in_8_bits
from benchmarks.tables import table
from proof.convergence.masters import DRAWS, MODELS, cell, distance, groups, take_steps
from proof.convergence.subjects import STEPS, SUBJECTS, Subject
from proof.part import Part
from proof.results import Failure, Verdict

HOWS = {"in 16 bits": None, 'in 8 bits, `saved="fp8"`': "fp8"}
"""The name of each way → the option `saved`."""
USUAL, NARROW = HOWS
CONTROL, CLASSIFIER, CLASSES, LONG = "in 8 bits, whatever reads it", "classifier", 1024, 14


class Classifier(nn.Module):
    """Three layers and their loss, as which falls logits grow: backward takes exp of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of [N, 64] numbers."""
        return F.cross_entropy(self.last(F.gelu(self.second(F.gelu(self.first(x))))), labels)


def points(draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Numbers [128, 64] near the centers of their classes."""
    centers = torch.randn(CLASSES, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (STEPS, 128), generator=draw)
    return [(centers[some] + 0.3 * torch.randn(128, 64, generator=draw), some) for some in labels]


def train(name: str, seed: int, how: str, draws: int = DRAWS) -> tuple[float, int]:
    """The loss of a trained model on other data, in float32, and the bytes that a step kept for backward.

    Small values are kept in 8 bits too: but for the classifier, models have no others.
    """
    subject = Subject(Classifier, points, 3e-3, "inductor") if name == CLASSIFIER else SUBJECTS[name]
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model = subject.model()  # with the same `saved` caches would give the control what ours is
    options: dict[str, Any] = {"lower": subject.lower, "saved": HOWS.get(how, {"*": "fp8", "last": "fp8"})}
    optimizer = torch.optim.AdamW(model.parameters(), lr=subject.rate, fused=True)
    changed: dict[str, Any] = {"least": keep_in_8_bits.least if name == CLASSIFIER else 0}
    changed |= {"_unfit_reader": lambda *_: ""} if how == CONTROL else {}
    with patch.multiple(keep_in_8_bits, **changed):
        run = torch.compile(model, backend="amp", options=options)
        loss = take_steps(subject, seed, model, optimizer, optimizer, draws, run)[2]
        batch = subject.batches(torch.Generator().manual_seed(seed))[0]
        return loss, ampcompile.explain(model, **options)(*batch).saved_totals.backward


def list_groups(everything: bool) -> list[str]:
    """The models of `PART=masters` and the classifier, with their seeds."""
    return groups(everything) + [f"{CLASSIFIER}, seed {seed}" for seed in range(3)]


def run(group: str, draws: int = DRAWS) -> Verdict:
    """The runs of one model and seed: where each ends, and what it keeps. The classifier's control must fail."""
    name, _, seed = group.partition(", seed ")
    hows, draws = ((*HOWS, CONTROL), LONG) if name == CLASSIFIER else (HOWS, draws)
    runs = {how: list(train(name, int(seed), how, draws)) for how in hows}
    failures = []
    if not runs[NARROW][1] < (0.95 if name == CLASSIFIER else 0.8) * runs[USUAL][1]:
        failures.append(Failure("bytes", f"8 bits keep {runs[NARROW][1]}, 16 bits {runs[USUAL][1]}"))
    if CONTROL in runs and runs[CONTROL][0] < 10 * runs[USUAL][0]:
        failures.append(Failure("control", f"the control ends at {runs[CONTROL][0]:.3g}"))
    return Verdict(group, {"runs": len(runs)} | ({"fails": len(failures)} if failures else {}), failures, runs)


def holds(apart: float, error: float) -> bool:
    """True if zero lies within two standard errors of the mean, or half a thousandth; both in thousandths."""
    return abs(apart) <= max(2 * error, 0.5)


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """A row for each model with two seeds at least."""
    rows = []
    for name in (*MODELS, CLASSIFIER):
        runs = [verdict for verdict in verdicts if verdict.group.startswith(f"{name}, ")]
        if len(runs) > 1:
            share = mean(verdict.figures[NARROW][1] / verdict.figures[USUAL][1] for verdict in runs)
            shown = "yes" if holds(*distance(runs, NARROW, USUAL)) else "no"
            losses = (cell(runs, how, USUAL) for how in HOWS)
            control = ", ".join(f"{v.figures[CONTROL][0]:.3g}" for v in runs if CONTROL in v.figures)
            rows.append([name, str(len(runs)), *losses, f"{share:.2f}", shown, control])
    return table(["", "seeds", "loss with 16 bits", "with 8", "bytes kept", "holds", "the control's losses"], rows)


PART = Part(
    "What backward keeps, in 8 bits",
    f"""A small GPT and a UNet train by amp in bfloat16 and AdamW for {DRAWS * STEPS} steps on the made-up data of
convergence: once as usual, once with `saved="fp8"`, where values of any size are kept in 8 bits. The loss is that of
the trained weights on other data, computed in float32. The difference is in thousandths, with the same initial weights
and batches, and the standard error of its mean. It holds if zero lies within two standard errors, or half a thousandth.
A classifier of {CLASSES:,} classes trains for {LONG * STEPS:,} steps with its loss within what is compiled. Its control
keeps logits in 8 bits too, of which backward takes exp, and must end ten times as far off.
""",
    list_groups,
    run,
    tabulate,
    seconds=900.0,
)
