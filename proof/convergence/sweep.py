"""Runs by model, type and seed, which name the groups, and what they show together."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import NamedTuple

import torch

from benchmarks.tables import table
from proof.convergence.subjects import SUBJECTS
from proof.convergence.training import train
from proof.part import Part
from proof.results import Failure, Verdict

LAST = 20
"""Steps whose losses are averaged."""
SHAKES = 2
LEARNS = 0.8
"""A run learns if it ends below this share of its first loss."""
APART = 0.05
"""Of a loss: two runs of one seed that end further apart didn't train the same way."""
LARGE, SHARP = 2.0, 4.0
"""Standard errors allowed: of float32's scatter over seeds, and over initial weights moved by a rounding. A right
implementation leaves two of the latter in one of twenty comparisons, and the page has a dozen."""
TYPES = {str(low).removeprefix("torch."): low for low in (torch.bfloat16, torch.float16)}
CONTROL = "16-bit weights"


class Ending(NamedTuple):
    """Where runs of a model in one type end, seed by seed, less where float32 does; and float32's own scatter."""

    differences: dict[str, list[float]]
    seeds: float
    shakes: float

    def standard_error(self, scatter: float) -> float:
        """Of a mean over the seeds."""
        return scatter / sqrt(len(self.differences["amp"]))

    def holds(self, how: str = "amp") -> bool:
        """True if the mean difference is within what float32 itself scatters by, both ways."""
        bounds = LARGE * self.standard_error(self.seeds), SHARP * self.standard_error(self.shakes)
        return abs(mean(self.differences[how])) <= min(bounds)


def groups(everything: bool) -> list[str]:
    """Three seeds, or five."""
    seeds = range(5 if everything else 3)
    return [f"{name}, {kind}, seed {seed}" for name in SUBJECTS for kind in ("float32", *TYPES) for seed in seeds]


def run(group: str) -> Verdict:
    """The runs of one model and seed in one type; where each begins and ends."""
    name, kind, text = group.rsplit(", ", 2)
    seed = int(text.removeprefix("seed "))
    runs = _in_float32(name, seed) if kind == "float32" else _in_16_bits(name, seed, TYPES[kind])
    figures = {how: [found[0], mean(found[-LAST:])] for how, found in runs.items()}
    failures = [
        Failure("learning", f"{how}: from {first:.4g} to {last:.4g}")
        for how, (first, last) in figures.items()
        if how not in ("stock", CONTROL) and not last < LEARNS * first
    ]
    if "stock" in figures:
        ours, theirs, stock = (figures[how][1] for how in ("amp", "eager autocast", "stock"))
        text = f"amp ends at {ours:.4g}, eager autocast at {theirs:.4g}, stock at {stock:.4g}"
        failures.append(Failure("training", text, stock=_apart(stock, theirs)))
    counts = {"runs": len(figures)} | ({"fails": len(failures)} if failures else {})
    return Verdict(group, counts, failures, figures)


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """A row for each model and type, differences in thousandths of a nat or of a squared unit."""
    head = ["", "by", "float32's loss", *(f"float32 {of}" for of in ("over seeds", "shaken")), "eager autocast"]
    rows = [
        (f"{name}, {kind}", SUBJECTS[name].lower, *_cells(verdicts, name, kind, ending))
        for (name, kind), ending in find_endings(verdicts).items()
    ]
    note = "\nBoth scatters are standard errors of the mean, differences the mean's; all four in thousandths.\n"
    return table([*head, "amp", "holds", CONTROL], rows) + note


def find_endings(verdicts: Sequence[Verdict]) -> dict[tuple[str, str], Ending]:
    """Of each model and type that has all its runs for two seeds at least."""
    found = {verdict.group: verdict.figures for verdict in verdicts}
    rows = {}
    for name in SUBJECTS:
        plain = {seed: runs for seed in range(5) if (runs := found.get(f"{name}, float32, seed {seed}"))}
        for kind in TYPES:
            low = {seed: runs for seed in plain if (runs := found.get(f"{name}, {kind}, seed {seed}"))}
            if len(low) < 2:
                continue
            ends = {seed: plain[seed]["float32"][1] for seed in low}
            hows = [how for how in ("eager autocast", "amp", CONTROL) if how in next(iter(low.values()))]
            differences = {how: [runs[how][1] - ends[seed] for seed, runs in low.items()] for how in hows}
            moved = [plain[seed][f"shake {n}"][1] - ends[seed] for seed in low for n in range(SHAKES)]
            rows[name, kind] = Ending(differences, stdev(ends.values()), sqrt(mean(by**2 for by in moved)))
    return rows


def _cells(verdicts: Sequence[Verdict], name: str, kind: str, ending: Ending) -> list[str]:
    runs = [v.figures["float32"] for v in verdicts if v.group.startswith(f"{name}, float32, seed ")]
    first, last = (mean(each) for each in zip(*runs, strict=True))
    means = {how: f"{1e3 * mean(values):+.3g}" for how, values in ending.differences.items()}
    scatters = (f"{1e3 * ending.standard_error(scatter):.2g}" for scatter in (ending.seeds, ending.shakes))
    held, falls = "yes" if ending.holds() else "no", f"{first:.3f} to {last:.3f}"
    return [falls, *scatters, means["eager autocast"], means["amp"], held, means.get(CONTROL, "")]


def _in_float32(name: str, seed: int) -> dict[str, list[float]]:
    shaken = {f"shake {n}": train(name, seed, "float32", shake=n) for n in range(SHAKES)}
    return {"float32": train(name, seed, "float32")} | shaken


def _in_16_bits(name: str, seed: int, low: torch.dtype) -> dict[str, list[float]]:
    hows = ["eager autocast", "amp", *([CONTROL] if low is torch.bfloat16 else [])]
    found = {how: train(name, seed, how, low) for how in hows}
    if _apart(*(mean(found[how][-LAST:]) for how in ("amp", "eager autocast"))):
        found["stock"] = train(name, seed, "stock", low)
    return found


def _apart(a: float, b: float) -> bool:
    return not abs(a - b) <= APART * b


PART = Part(
    "Convergence",
    """Small models train by AdamW for 150 steps on made-up data: text of a second-order Markov chain, noisy
images of ten kinds to tell or to clean. In each row runs with the same initial weights and the same batches are paired,
and the mean of their last 20 losses is compared with float32's: eager autocast, with torch's scaler in float16; amp,
with `ampcompile.GradScaler`; and, to see what the test finds, a model whose weights are themselves in bfloat16.

Two scatters of float32 say how large a difference may be by chance. Over seeds, other initial weights and batches:
amp's mean difference must be within two standard errors of that. Within a seed, initial weights moved by up to 2⁻⁹ of
themselves, as rounding to bfloat16 moves them: a far smaller scatter, of which four standard errors are allowed. Losses
must also fall below 80 % of the first, and a run of amp that ends more than 5 % away from eager autocast's is tried
with stock `torch.compile` under autocast.
""",
    groups,
    run,
    tabulate,
    seconds=900.0,
)
