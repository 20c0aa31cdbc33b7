"""PyTorch's benchmark scripts, asked for one model at a time, the backends in turn.

Groups are `model, mode, run N`, timed, and `model, mode, accuracy`. THE SCRIPTS ARE RUN: let DYNAMO_BENCHMARKS name
only code that you trust.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch

from benchmarks.report.tables import table
from proof.dashboard.models import CAUSES, LEFT_OUT, MODELS
from proof.part import Part
from proof.results import Verdict, about

PEER, FROZEN = "inductor", "inductor_freezing"
WAYS = {"inference": (PEER, FROZEN, "amp"), "training": (PEER, "amp", "amp_every_call")}
"""Mode → what is timed in turn: backends, and Inductor with `--freezing`."""
COMPARED = (PEER, "amp")
"""The backends that are timed again in later runs, and judged by accuracy."""
RUNS = 5
"""Of everything; the sample has one."""
ACCURACY = "accuracy"
SECONDS = 600
"""That one call of a script may take."""
ITERATIONS, BATCH = 5, 1
LAUNCHER = (sys.executable, "-m", "proof.dashboard.launch")
NEEDED = ("numpy", "pandas", "psutil", "scipy", "tabulate", "tqdm", "transformers", "timm")
"""Packages that the scripts import beside torch."""
MISSING = """DYNAMO_BENCHMARKS={found}: expected the folder benchmarks/dynamo of a checkout of PyTorch. With
  git clone --depth 1 --branch v{version} --filter=blob:none --sparse https://github.com/pytorch/pytorch
  git -C pytorch sparse-checkout set benchmarks/dynamo
there is one, and this runs it: make proof PART=dashboard DYNAMO_BENCHMARKS=pytorch/benchmarks/dynamo"""
SLOWER = 0.97
"""Of Inductor's speed, by either ratio; below, the page says why."""
BY_EAGER = "not by their own times; eager autocast took longer where Inductor ran"
NAMES = {PEER: "Inductor", FROZEN: "Inductor, frozen", "amp": "amp", "amp_every_call": "every_call"}


def groups(everything: bool) -> list[str]:
    """One run of each model, or as many as are compared; and its accuracy."""
    kinds = [*(f"run {n}" for n in range(1, (RUNS if everything else 1) + 1)), ACCURACY]
    return [f"{model}, {mode}, {kind}" for kind in kinds for each in MODELS.values() for model in each for mode in WAYS]


def run(group: str) -> Verdict:
    """Each way's speedup and milliseconds, 0 where it fails; or the scripts' words for what they saw."""
    model, mode, kind = group.split(", ")
    if kind == ACCURACY:
        said = {way: line_of(ACCURACY, mode, way, model) for way in COMPARED}
        return Verdict(group, {f"{way}: {line.get(ACCURACY, 'fail_to_run')}": 1 for way, line in said.items()})
    ways = WAYS[mode] if kind == "run 1" else COMPARED
    timed = {way: line_of("performance", mode, way, model) for way in ways}
    figures = {way: [float(line.get(name) or 0) for name in ("speedup", "abs_latency")] for way, line in timed.items()}
    return Verdict(group, {"timed": len(figures)}, figures=figures)


def line_of(kind: str, mode: str, way: str, model: str) -> dict[str, str]:
    """The line that the script writes of a model; empty if it dies or takes too long."""
    (script,) = (script for script, models in MODELS.items() if model in models)
    with tempfile.TemporaryDirectory() as name:
        command = [*LAUNCHER, str(_checkout() / f"{script}.py"), f"--{kind}", f"--{mode}"]
        command += f"--amp --device cpu --only {model} --backend {PEER if way == FROZEN else way}".split()
        command += f"--batch-size {BATCH} --repeat {ITERATIONS} --threads 1".split() + ["--freezing"] * (way == FROZEN)
        command += ["--output-directory", name, "--output", "found.csv"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, env=environment, timeout=SECONDS, check=False, text=True, stdout=-1, stderr=subprocess.STDOUT
            )
        except subprocess.TimeoutExpired:
            print(f"{model}: more than {SECONDS} seconds", file=sys.stderr)
            return {}
        path = Path(name, "found.csv")
        lines = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    if not lines:
        print(done.stdout[-3000:], file=sys.stderr)
    return lines[-1] if lines else {}


def _checkout() -> Path:
    return Path(os.environ.get("DYNAMO_BENCHMARKS", ""))


def missing() -> str:
    """The packages that the scripts lack, and how to get them; empty if none."""
    if not (_checkout() / "common.py").exists():
        return MISSING.format(found=_checkout(), version=torch.__version__.partition("+")[0])
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"the scripts import {', '.join(absent)}: python -m pip install {' '.join(absent)}" if absent else ""


def facts() -> dict[str, Any]:
    """The machine, versions, and how the scripts were asked."""
    files = (parent / "version.txt" for parent in _checkout().resolve().parents)
    release = next((file.read_text().strip() for file in files if file.exists()), "unknown")
    packages = "".join(f", {name} {metadata.version(name)}" for name in ("transformers", "timm"))
    asked = f"; scripts of PyTorch {release}; batches of {BATCH}, medians of {ITERATIONS} calls"
    return about() | {"with": f"{packages}, 1 thread{asked}"}


class Timed(NamedTuple):
    """The result of a run; a speedup of 0 is a failure."""

    speedup: float
    milliseconds: float


class Row(NamedTuple):
    """Runs and verdicts of a model in one mode, by way."""

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


def rows(verdicts: Sequence[Verdict], mode: str) -> Iterator[Row]:
    """The models that both amp and Inductor were timed on."""
    for model in (model for models in MODELS.values() for model in models):
        found = [verdict for verdict in verdicts if verdict.group.startswith(f"{model}, {mode}, ")]
        runs = {way: [Timed(*v.figures[way]) for v in found if way in v.figures] for way in WAYS[mode]}
        judged = dict(said.split(": ") for v in found if v.group.endswith(ACCURACY) for said in v.counts)
        if runs[PEER] and runs["amp"]:
            yield Row(model, runs, {way: judged.get(way, "not run") for way in COMPARED})


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """Speedups by mode, where amp is slower than Inductor and why, and what wasn't run."""
    text, known = "", set[str]()
    slower: dict[str, list[str]] = {}
    for mode, ways in WAYS.items():
        if found := list(rows(verdicts, mode)):
            known |= {row.model for row in found}
            text += f"{mode.capitalize()}, speedup over eager autocast:\n\n{_table(found, ways)}\n"
        for row in found:
            ratios = [ratio for ratio in (row.ratio(), row.ratio_without_eager()) if ratio is not None]
            if ratios and min(ratios) < SLOWER:
                why = CAUSES.get(row.model, "not known yet") if ratios[1] < SLOWER else BY_EAGER
                slower.setdefault(why, []).append(f"{row.model} in {mode}")
    if slower:
        text += f"Below {SLOWER} of Inductor's speed, and why:\n\n"
        text += "".join(f"- {', '.join(names)}: {' '.join(why.split())}.\n" for why, names in slower.items()) + "\n"
    text += "Models of huggingface.py that are left out, and of both scripts those that wait for the next run:\n\n"
    waiting = tuple(model for models in MODELS.values() for model in models if model not in known)
    return text + "".join(
        f"- {why}: {', '.join(names)}\n" for why, names in (LEFT_OUT | {"not run yet": waiting}).items() if names
    )


def _table(found: Sequence[Row], ways: tuple[str, ...]) -> str:
    head = ["", "amp / Inductor", "without eager", *(NAMES[way] for way in ways)]
    figures = [(row.ratio(), row.ratio_without_eager(), *map(row.speedup, ways)) for row in found]
    lines = [
        [row.model, *map(_times, of_row), str(min(len(row.runs[way]) for way in COMPARED)), *row.verdicts.values()]
        for row, of_row in zip(found, figures, strict=True)
    ]
    means = map(_mean, zip(*figures, strict=True))
    return table([*head, "runs", "accuracy: Inductor", "amp"], [*lines, ["geometric mean (of)", *means, "", "", ""]])


def _mean(column: Iterable[float | None]) -> str:
    values = [value for value in column if value is not None]
    return f"{_times(geometric_mean(values))} ({len(values)})" if values else ""


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


PART = Part(
    "PyTorch's own benchmarks",
    """`make proof PART=dashboard DYNAMO_BENCHMARKS=path/to/benchmarks/dynamo` runs the scripts behind PyTorch's
dashboard of performance. It executes the code of the checkout that it is given, and has no part in `make proof` alone.
Each model runs with `--amp --device cpu --backend inductor`, then with `--backend amp`; proof/results/dashboard.json
has what the scripts write of each. They open `torch.autocast("cpu")`, bfloat16, inside the function that they compile,
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
""",
    groups,
    run,
    tabulate,
    seconds=3 * SECONDS + 60.0,
    about=facts,
    missing=missing,
)
