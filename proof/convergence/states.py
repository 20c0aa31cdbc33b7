"""Train with optimizer states in 16 and in 8 bits, also where parameters are small, and with 7.1 bytes a parameter."""

from collections.abc import Sequence

import torch

from ampcompile.optim import AdamW
from benchmarks.tables import table
from proof.convergence.codes import code_all
from proof.convergence.masters import DRAWS, MODELS, cell, groups, take_steps
from proof.convergence.subjects import STEPS, SUBJECTS
from proof.part import Part
from proof.results import Verdict

FLOAT32 = "float32"
SMALLEST = '8bit, of bfloat16 parameters with `"remainder8"`'
HOWS = (FLOAT32, "bfloat16", "8bit", SMALLEST)


def train(name: str, seed: int, how: str, draws: int) -> float:
    """The loss on other data of the parameters that a run ends with."""
    torch.manual_seed(seed)
    model = (subject := SUBJECTS[name]).model()
    if how == SMALLEST:
        optimizer = AdamW(model.bfloat16().parameters(), subject.rate, masters="remainder8", states="8bit", seed=seed)
    else:
        optimizer = AdamW(model.parameters(), subject.rate, states=how, seed=seed)
    return take_steps(subject, seed, model, optimizer, optimizer, draws)[2]


def run(group: str, draws: int = DRAWS) -> Verdict:
    """All runs of one model and seed: where each ends."""
    code_all()
    name, _, seed = group.partition(", seed ")
    return Verdict(group, {"runs": len(HOWS)}, figures={how: [train(name, int(seed), how, draws)] for how in HOWS})


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """A row for each way: the loss with float32 states, and how far the others end from it."""
    found = [[verdict for verdict in verdicts if verdict.group.startswith(f"{name}, ")] for name in MODELS]
    return table(["states", *MODELS], [[how, *(cell(some, how, FLOAT32) for some in found)] for how in HOWS])


PART = Part(
    "Optimizer states in training",
    f"""The GPT and the UNet of the chapter about 16 bits train for {DRAWS * STEPS} steps, in float32 but for the last
row, whose parameters are of bfloat16. All parameters of two dimensions and more are coded, however small. The first row
is the loss on other data, in float32; the others are differences from it in thousandths, with the standard error of
their mean.
""",
    groups,
    run,
    tabulate,
    seconds=3600.0,
)
