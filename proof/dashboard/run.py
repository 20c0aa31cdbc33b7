"""Asks PyTorch's benchmark scripts for one model at a time, the backends in turn, and keeps the CSV lines they write.

THE SCRIPTS ARE RUN: point --checkout only at code that you trust.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from proof.dashboard.models import MODELS
from proof.results import RESULTS, about

FOLDER = RESULTS / "dashboard"
PEER, FROZEN = "inductor", "inductor_freezing"
WAYS = {"inference": (PEER, FROZEN, "amp"), "training": (PEER, "amp", "amp_every_call")}
"""Mode → what is timed in turn: backends, and Inductor with `--freezing`."""
COMPARED = (PEER, "amp")
"""What is timed again where a run has repeats, and judged by accuracy."""
LAUNCHER = (sys.executable, "-m", "proof.dashboard.launch")
COMMON = ("numpy", "pandas", "psutil", "scipy", "tabulate", "tqdm")
NEEDED = {"huggingface": (*COMMON, "transformers"), "timm_models": (*COMMON, "timm")}
"""Script → what it imports beside torch."""
FAILED = {"accuracy": ("accuracy", "fail_to_run"), "performance": ("speedup", "0.000000")}
"""Kind of run → what a line says of a model whose process died: the column, and the scripts' own word for it."""
MISSING = """{found}: expected the folder benchmarks/dynamo of a checkout of PyTorch. None comes with us; with
  git clone --depth 1 --branch v{version} --filter=blob:none --sparse https://github.com/pytorch/pytorch
  git -C pytorch sparse-checkout set benchmarks/dynamo
there is one, and this runs it: make proof PART=dashboard DYNAMO_BENCHMARKS=pytorch/benchmarks/dynamo"""


class Run(NamedTuple):
    """One call of a script."""

    kind: str
    mode: str
    way: str
    script: str
    model: str

    @property
    def backend(self) -> str:
        """What `--backend` says."""
        return PEER if self.way == FROZEN else self.way

    def path(self, folder: Path) -> Path:
        """The file that its line goes to."""
        return folder / f"{self.script}_{self.kind}_{self.mode}_{self.way}.csv"

    def lines(self, folder: Path) -> list[dict[str, str]]:
        """What is known already."""
        return [line for line in read(self.path(folder)) if line["name"] == self.model]


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file; none of one that isn't there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def runs(kinds: Sequence[str], repeats: int, wanted: str) -> Iterator[tuple[Run, int]]:
    """Every call in its order, with how many lines its model has after it: all models, then those once more that are
    compared.
    """
    for count in range(1, repeats + 1):
        for script, models in MODELS.items():
            for model in models:
                for kind in kinds if re.search(wanted, model) else ():
                    for mode, ways in WAYS.items():
                        for way in ways if kind == "performance" and count == 1 else COMPARED:
                            if kind == "performance" or count == 1:
                                yield Run(kind, mode, way, script, model), count


def line_of(run: Run, checkout: Path, options: argparse.Namespace) -> dict[str, str]:
    """What the script writes of a model; if it dies or takes too long, what it writes then in a run over all models."""
    with tempfile.TemporaryDirectory() as name:
        command = [*LAUNCHER, str(checkout / f"{run.script}.py")]
        command += f"--{run.kind} --{run.mode} --amp --device cpu --only {run.model} --backend {run.backend}".split()
        command += f"--batch-size {options.batch_size} --repeat {options.iterations} --threads 1".split()
        command += ["--freezing"] * (run.way == FROZEN)
        command += ["--output-directory", name, "--output", "found.csv"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            log = subprocess.run(
                command, env=environment, timeout=options.seconds, check=False, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ).stdout  # fmt: skip
        except subprocess.TimeoutExpired:
            log = f"more than {options.seconds} seconds"
        found = read(Path(name) / "found.csv")
    if found:
        return found[-1]
    print(log[-3000:], file=sys.stderr)
    column, word = FAILED[run.kind]
    return {"dev": "cpu", "name": run.model, "batch_size": "0", column: word}


def add(path: Path, line: dict[str, str]) -> None:
    """Append a line to a CSV file, which begins with its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*read(path), line]
    columns = list(dict.fromkeys(column for each in lines for column in each))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def missing(checkout: Path | None, wanted: str) -> str:
    """What keeps the scripts from running, and how to get it; empty if nothing does."""
    version = importlib.import_module("torch").__version__.partition("+")[0]
    if checkout is None or not (checkout / "common.py").exists():
        return MISSING.format(found=f"DYNAMO_BENCHMARKS={checkout or ''}", version=version)
    scripts = [script for script, models in MODELS.items() if any(re.search(wanted, model) for model in models)]
    needed = {name for script in scripts for name in NEEDED[script]}
    absent = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    return f"the scripts import {', '.join(absent)}: python -m pip install {' '.join(absent)}" if absent else ""


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    found = argparse.ArgumentParser(prog="python -m proof dashboard", description=__doc__)
    default = os.environ.get("DYNAMO_BENCHMARKS")
    found.add_argument(
        "--checkout",
        type=Path,
        default=Path(default) if default else None,
        help="benchmarks/dynamo of a checkout of PyTorch, whose code is run (default: $DYNAMO_BENCHMARKS)",
    )
    found.add_argument("--only", default="", metavar="PATTERN", help="models whose names have this in them")
    found.add_argument("--kinds", nargs="+", choices=FAILED, default=list(FAILED), help="(default: both)")
    found.add_argument("--repeats", type=int, default=1, help="runs of each backend, in turn (default %(default)s)")
    found.add_argument("--iterations", type=int, default=5, help="timed calls in a run (default %(default)s)")
    found.add_argument("--batch-size", type=int, default=1, help="(default %(default)s)")
    found.add_argument("--seconds", type=float, default=600, help="a run's limit (default %(default)g)")
    found.add_argument("--results", type=Path, default=FOLDER, help="folder of the CSVs (default %(default)s)")
    return found


def release(checkout: Path) -> str:
    """PyTorch's version that a checkout is of."""
    files = (parent / "version.txt" for parent in checkout.resolve().parents)
    return next((file.read_text().strip() for file in files if file.exists()), "unknown")


def _version(package: str) -> str:
    return metadata.version(package) if importlib.util.find_spec(package) else ""


def main(arguments: Sequence[str]) -> int:
    """Run what has too few lines yet; 2 if something is missing."""
    options = parser().parse_args(arguments)
    if why := missing(options.checkout, options.only):
        print(why, file=sys.stderr)
        return 2
    options.results.mkdir(parents=True, exist_ok=True)
    facts = about() | {
        "packages": {name: _version(name) for name in ("transformers", "timm")},
        "scripts": release(options.checkout),
        "batch size": options.batch_size,
        "iterations": options.iterations,
    }
    (options.results / "about.json").write_text(json.dumps(facts, indent=1) + "\n")
    for run, count in runs(options.kinds, options.repeats, options.only):
        if len(run.lines(options.results)) < count:
            line = line_of(run, options.checkout, options)
            add(run.path(options.results), line)
            print(*run, line.get(FAILED[run.kind][0]), flush=True)
    return 0
