"""The page's chapter of what PyTorch's own benchmark scripts found, from their CSV files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.report.tables import table
from proof.dashboard.models import CAUSES, LEFT_OUT, MODELS
from proof.dashboard.run import FOLDER, FROZEN, PEER, WAYS, Run

SAYS = """`make proof PART=dashboard DYNAMO_BENCHMARKS=path/to/benchmarks/dynamo` runs the scripts behind PyTorch's
dashboard of performance. It executes the code of the checkout that it is given, and has no part in `make proof` alone.
Each model runs with `--amp --device cpu --backend inductor`, then with `--backend amp`; proof/results/dashboard/ has
the lines that the scripts write. They open `torch.autocast("cpu")`, bfloat16, inside the function that they compile,
for eager and both backends alike. A speedup is over eager autocast, in the same process, call by call in turn.
`accuracy` is the scripts' verdict, by one tolerance for both.

Inductor and amp run in turn, as often as `runs` says; the rest runs once. "amp / Inductor" is the median ratio of the
speedups of two neighbours, "without eager" that of their times: where these differ, it is by eager autocast's own time,
which differs by up to 40 % from process to process. They had one core for themselves, other jobs the other one.

A launcher of ours, proof/dashboard/launch.py, leaves the scripts as they are and puts around them what they lack:

- Models have the installed transformers' and timm's configurations and random weights: nothing is downloaded. Caches of
  keys and values are off: the scripts can't compare the object that transformers 5 returns them in. Where transformers
  warns, the graph doesn't break.
- amp runs with `outputs="autocast"`. The scripts want eager autocast's dtypes, and since no autocast is open around the
  call, amp would return them in float32.
- Both backends run what torch.compile returned, and compile nothing while time is taken. The scripts call
  `torch._dynamo.run` on the function that they had compiled: without the autocast that amp opens around its calls, no
  graph of amp's fits, and it would run uncompiled.

On a CPU the scripts train without an optimizer: no weight changes, and amp never makes its copies again. `every_call`
is amp with `weights="every_call"`, which casts weights in each call, as Inductor does. Inductor keeps copies only with
`--freezing`, for inference with weights that stay as they are. A batch of one shows the most of what copies save: with
more to compute, casts of weights take a smaller share.
"""
SLOWER = 0.97
"""Of Inductor's speed, by either ratio; below, the page says why."""
BY_EAGER = "not by their own times; eager autocast took longer where Inductor ran"
NAMES = {PEER: "Inductor", FROZEN: "Inductor, frozen", "amp": "amp", "amp_every_call": "every_call"}


def chapter(folder: Path = FOLDER) -> Iterator[str]:
    """The chapter's paragraphs; none without results."""
    if not (folder / "about.json").exists():
        return
    yield "## PyTorch's own benchmarks\n"
    yield SAYS
    yield _machine(json.loads((folder / "about.json").read_text()))
    known: set[str] = set()
    slower: dict[str, list[str]] = {}
    for mode, ways in WAYS.items():
        if rows := list(_rows(folder, mode, ways)):
            known |= {row.model for row in rows}
            yield f"{mode.capitalize()}, speedup over eager autocast:\n"
            yield _table(rows, ways)
        for row in rows:
            ratios = [ratio for ratio in (row.ratio(), row.ratio_without_eager()) if ratio is not None]
            if ratios and min(ratios) < SLOWER:
                why = CAUSES.get(row.model, "not known yet") if ratios[1] < SLOWER else BY_EAGER
                slower.setdefault(why, []).append(f"{row.model} in {mode}")
    if slower:
        yield f"Below {SLOWER} of Inductor's speed, and why:\n"
        yield "".join(f"- {', '.join(names)}: {' '.join(why.split())}.\n" for why, names in slower.items())
    yield "Models of huggingface.py that are left out, and of both scripts those that wait for the next run:\n"
    waiting = [model for models in MODELS.values() for model in models if model not in known]
    yield "".join(
        f"- {why}: {', '.join(names)}\n" for why, names in (LEFT_OUT | {"not run yet": waiting}).items() if names
    )


def _machine(facts: dict[str, Any]) -> str:
    units = ", ".join(facts["low-precision instructions"]) or "no 16-bit units"
    packages = "".join(f", {name} {version}" for name, version in facts["packages"].items() if version)
    return (
        f"{facts['processor']}, {units}, 1 thread; {facts['system']}, Python {facts['python']}, torch {facts['torch']}"
        f"{packages}; scripts of PyTorch {facts['scripts']}; batches of {facts['batch size']}, medians of "
        f"{facts['iterations']} calls; commit {facts['commit']}.\n"
    )


class Timed(NamedTuple):
    """What a run found; a speedup of 0 is a failure."""

    speedup: float
    milliseconds: float


class Row(NamedTuple):
    """What is known of a model in one mode, by way: runs and verdicts."""

    model: str
    runs: dict[str, list[Timed]]
    verdicts: dict[str, str]

    def speedup(self, way: str) -> float | None:
        """The median; None if there is no run, or one failed."""
        found = [run.speedup for run in self.runs[way]]
        return median(found) if found and all(found) else None

    def ratio(self) -> float | None:
        """How many times as fast as Inductor amp is, by the median of runs in turn; None if one failed."""
        return self._median(lambda peer, amp: amp.speedup / peer.speedup)

    def ratio_without_eager(self) -> float | None:
        """Likewise, but by the times themselves."""
        return self._median(lambda peer, amp: peer.milliseconds / amp.milliseconds)

    def _median(self, ratio: Callable[[Timed, Timed], float]) -> float | None:
        pairs = list(zip(self.runs[PEER], self.runs["amp"], strict=False))
        whole = all(run.speedup for pair in pairs for run in pair)
        return median(ratio(peer, amp) for peer, amp in pairs) if whole else None


def _rows(folder: Path, mode: str, ways: tuple[str, ...]) -> Iterator[Row]:
    """The models that both amp and Inductor were timed on."""
    for script, models in MODELS.items():
        for model in models:
            runs, verdicts = {}, {}
            for way in ways:
                timed, judged = (
                    Run(kind, mode, way, script, model).lines(folder) for kind in ("performance", "accuracy")
                )
                runs[way] = [Timed(float(line["speedup"]), float(line.get("abs_latency") or 0)) for line in timed]
                verdicts[way] = judged[-1]["accuracy"] if judged else "not run"
            if runs[PEER] and runs["amp"]:
                yield Row(model, runs, verdicts)


def _table(rows: list[Row], ways: tuple[str, ...]) -> str:
    head = ["", "amp / Inductor", "without eager", *(NAMES[way] for way in ways)]
    head += ["runs", "accuracy: Inductor", "amp"]
    figures = [(row.ratio(), row.ratio_without_eager(), *map(row.speedup, ways)) for row in rows]
    lines = [
        [
            row.model,
            *map(_times, of_row),
            str(min(len(row.runs[PEER]), len(row.runs["amp"]))),
            row.verdicts[PEER],
            row.verdicts["amp"],
        ]
        for row, of_row in zip(rows, figures, strict=True)
    ]
    means = map(_mean, zip(*figures, strict=True))
    return table(head, [*lines, ["geometric mean (of)", *means, "", "", ""]])


def _mean(column: Iterable[float | None]) -> str:
    values = [value for value in column if value is not None]
    return f"{_times(geometric_mean(values))} ({len(values)})" if values else ""


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
