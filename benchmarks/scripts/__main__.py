"""python -m benchmarks.scripts CHECKOUTS [CASE ...]   run the scripts, and write figures.json and the page's table
python -m benchmarks.scripts                         write the table of docs/integrations.md from figures.json

CHECKOUTS is a folder with clones named as their repositories (accelerate, pytorch-lightning, peft), bare or not, which
hold the pinned commits. Nothing is downloaded. `make bench-scripts CHECKOUTS=...` installs what the scripts import.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import machine, runner
from benchmarks.records import Records
from benchmarks.report.tables import table
from benchmarks.runner import Job

from .cases import CASES, WAYS, Case

FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TABLE = re.compile(
    r"(?<=<!-- Written by `python -m benchmarks.scripts`. -->\n\n).*?(?=<!-- The table ends. -->)", re.DOTALL
)


def take(case: Case, checkouts: Path, folder: Path) -> None:
    """The Python files of the script's folder, at its commit."""
    clone, inside = checkouts / case.repository.partition("/")[2], case.script.rpartition("/")[0]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", clone, *arguments], check=True, capture_output=True, text=True).stdout

    (folder / inside).mkdir(parents=True)
    for path in git("ls-tree", "--name-only", case.commit, f"{inside}/").split():
        if path.endswith(".py"):
            (folder / path).write_text(git("show", f"{case.commit}:{path}"))


def run(case: Case, way: str, checkouts: Path) -> dict[str, list[float]]:
    """The notes of probe.py. Raises CalledProcessError where the script fails, and prints what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name) / "repository", Path(name) / "work"
        work.mkdir()
        take(case, checkouts, folder)
        for diff in case.diffs(way):
            subprocess.run(["git", "apply", "--unidiff-zero", diff], check=True, cwd=folder)
        case.prepare(work)
        figures = Path(name) / "figures.json"
        arguments = f"{case.arguments} {case.inductor if way == 'inductor' else ''}".split()
        caches = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{name}/hub", "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor"}
        environment = os.environ | caches | (case.environment if way == "inductor" else {})
        probe = Path(__file__).with_name("probe.py")
        command = [sys.executable, str(probe), str(figures), str(folder / case.script), *arguments]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-6000:], file=sys.stderr)
        done.check_returncode()
        found: dict[str, list[float]] = json.loads(figures.read_text())
    return found


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of the processor that a step takes (quartiles over the second half), and means of five losses."""
    busy, losses = found["busy"], found["losses"]
    times = [1000 * (after - before) for before, after in pairwise(busy)][len(busy) // 2 :]
    return {
        "steps": len(busy),
        "ms": [round(value, 1) for value in statistics.quantiles(times, n=4)],
        "first": round(statistics.mean(losses[:5]), 4),
        "last": round(statistics.mean(losses[-5:]), 4),
    }


def page_table(stages: dict[str, Any]) -> str:
    """Markdown: one row for each way, of the scripts that ran all of them on one machine."""
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        ran = stages.get(case.name, {})
        for way in WAYS if set(WAYS) <= set(ran) else ():
            found = ran[way]
            low, middle, high = found["ms"]
            name, steps = (f"{case.repository} `{case.script}`", str(found["steps"])) if way == WAYS[0] else ("", "")
            time, losses = f"{middle:g} ({low:g} to {high:g})", (f"{found[end]:.4f}" for end in ("first", "last"))
            rows.append((name, steps, way, time, *losses))
    head = ["script", "steps", "way", "ms a step", "loss, first 5 steps", "last 5"]
    return table(head, rows) if rows else "No figures are committed yet.\n"


def measured(case: Case, way: str, checkouts: Path) -> tuple[dict[str, Any], list[str]]:
    """The record of a script that ran one way, and the lines to print."""
    found = summary(run(case, way, checkouts))
    return found, [str(found)]


def main() -> None:
    """See above."""
    folder, *names = sys.argv[1:] or [""]
    about = machine.about("cpu")
    records = Records.load(FIGURES)
    if folder and records.about != about:
        records = Records(FIGURES, about)
    chosen = [case for case in CASES if folder and case.name in (names or [case.name])]
    runner.run(
        [Job(records, case.name, way, partial(measured, case, way, Path(folder))) for case in chosen for way in WAYS]
    )
    PAGE.write_text(TABLE.sub(lambda _: page_table(records.stages), PAGE.read_text()))


if __name__ == "__main__":
    main()
