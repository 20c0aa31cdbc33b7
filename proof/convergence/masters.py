"""Train bfloat16 parameters with float32 masters, with what `keep_masters` keeps, and with nothing beside them."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import ampcompile
from benchmarks.tables import table
from proof.convergence.subjects import STEPS, SUBJECTS, Subject
from proof.part import Part
from proof.results import Failure, Verdict

MODELS = ("GPT", "UNet")
SEEDS = 5
DRAWS = 6
"""Of a subject's batches; one more to see what was learned."""
BY_HAND = "float32 masters, by hand"
HOWS = {
    BY_HAND: "",
    '`"remainder"`': "remainder",
    '`"float32"`, ties to even': "float32",
    '`"stochastic"`': "stochastic",
    "nothing, torch's AdamW": "",
    "no bfloat16: all in float32": "",
}
"""The name of each way → `how` of `keep_masters`, empty without it."""


class ByHand:
    """AdamW on float32 weights, which are rounded to the parameters, ties away from zero.

    By the scaler's step of float32 parameters: torch's own rounds the last elements of a tensor otherwise than the
    others.
    """

    def __init__(self, params: Sequence[nn.Parameter], rate: float) -> None:
        self.params = params
        self.masters = [nn.Parameter(param.detach().float()) for param in params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=rate, fused=True)
        self.scaler = ampcompile.GradScaler("cpu", enabled=False)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.scaler.step(self.optimizer)
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(round_ties_away(master))


def round_ties_away(master: Tensor) -> Tensor:
    """Round float32 to bfloat16, ties away from zero."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def train(name: str, seed: int, how: str, draws: int = DRAWS) -> tuple[list[float], list[Tensor], float]:
    """The losses of a run, step by step, its parameters at the end, and their loss on other data, in float32.

    The learning rate falls to 0 in a line.
    """
    subject = SUBJECTS[name]
    torch.manual_seed(seed)
    model = subject.model()
    dtype = torch.float32 if "all in float32" in how else torch.bfloat16
    params = list(model.to(dtype).parameters())
    by_hand = ByHand(params, subject.rate) if how == BY_HAND else None
    optimizer = torch.optim.AdamW(params, lr=subject.rate, fused=True) if by_hand is None else by_hand.optimizer
    if HOWS[how]:
        ampcompile.keep_masters(optimizer, HOWS[how], seed=seed)
    return take_steps(subject, seed, model, optimizer, by_hand or optimizer, draws)


def take_steps(
    subject: Subject,
    seed: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stepper: Any,
    draws: int,
    compiled: Any = None,
) -> tuple[list[float], list[Tensor], float]:
    """What `train` returns. `stepper` takes the steps, at the rates that `optimizer` has."""
    run = model if compiled is None else compiled
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, draws * STEPS)
    draw, params, found = torch.Generator().manual_seed(seed), list(model.parameters()), []
    for _ in range(draws):
        for batch in subject.batches(draw):
            loss = run(*(part.to(params[0].dtype) if part.is_floating_point() else part for part in batch))
            model.zero_grad()
            loss.backward()
            stepper.step()
            schedule.step()
            found.append(loss.item())
    at_end = [param.detach().clone() for param in params]
    with torch.no_grad():
        model.float()
        return found, at_end, mean(model(*batch).item() for batch in subject.batches(draw))


def groups(everything: bool) -> list[str]:
    """The models, each with its seeds."""
    return [f"{name}, seed {seed}" for name in MODELS for seed in range(SEEDS)]


def run(group: str, draws: int = DRAWS) -> Verdict:
    """All runs of one model and seed; where each ends, and whether remainders gave the bits of masters by hand."""
    name, _, seed = group.partition(", seed ")
    runs = {how: train(name, int(seed), how, draws) for how in HOWS}
    (losses, params, _), (others, weights, _) = runs[BY_HAND], runs['`"remainder"`']
    equal = losses == others and all(map(torch.equal, params, weights))
    failures = [] if equal else [Failure("bits", f"remainders end at {others[-1]:.6g}, masters at {losses[-1]:.6g}")]
    counts = {"runs": len(runs)} | ({"fails": 1} if failures else {})
    return Verdict(group, counts, failures, {how: [found] for how, (_, _, found) in runs.items()})


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """A row for each way: the loss of masters by hand, and how far the others end from it."""
    found = {name: [v for v in verdicts if v.group.startswith(f"{name}, ")] for name in MODELS}
    return table(
        ["beside bfloat16 parameters", *MODELS], [[how, *(_cell(v, how) for v in found.values())] for how in HOWS]
    )


def _cell(verdicts: Sequence[Verdict], how: str) -> str:
    """The mean over seeds, with its standard error."""
    if "remainder" in how and len(verdicts) > 1 and not any(verdict.failures for verdict in verdicts):
        return "the same bits"
    return cell(verdicts, how, BY_HAND)


def cell(verdicts: Sequence[Verdict], how: str, beside: str) -> str:
    """The mean over seeds, or its distance from another way's in thousandths, with its standard error."""
    if how == beside or len(verdicts) < 2:
        return f"{mean(verdict.figures[how][0] for verdict in verdicts):.4f}" if verdicts else ""
    return "{:+.2f} ± {:.2f}".format(*distance(verdicts, how, beside))


def distance(verdicts: Sequence[Verdict], how: str, beside: str) -> tuple[float, float]:
    """The mean over seeds of how far one way ends from another, in thousandths, and its standard error."""
    found = [1e3 * (verdict.figures[how][0] - verdict.figures[beside][0]) for verdict in verdicts]
    return mean(found), stdev(found) / sqrt(len(found))


PART = Part(
    "Parameters of 16 bits",
    f"""A small GPT and a UNet in bfloat16 train by AdamW for {DRAWS * STEPS} steps on the made-up data of the chapter
before, run eagerly, with {SEEDS} seeds. The first row is the loss of the trained parameters on other data, computed in
float32, where float32 masters lie beside them, ties are rounded away from zero, and all of it is written by hand around
an optimizer of float32 weights. The others are differences from it in thousandths, with the same initial weights and
batches, and the standard error of their mean. Remainders must give the bits of masters by hand: of each step's loss,
and of all parameters.
""",
    groups,
    run,
    tabulate,
    seconds=900.0,
)
