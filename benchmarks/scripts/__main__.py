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
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import machine

from .cases import CASES, WAYS, Case

FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TABLE = re.compile(
    r"(?<=<!-- Written by `python -m benchmarks.scripts`. -->\n\n).*?(?=\n<!-- The table ends. -->)", re.DOTALL
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
    """What probe.py notes. Raises CalledProcessError where the script fails, and prints what it printed."""
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


def table(figures: dict[str, Any]) -> str:
    """Markdown: one row for each way, of the scripts that ran all of them on one machine."""
    rows = ["| script | steps | way | ms a step | loss, first 5 steps | last 5 |", "|---|--:|---|--:|--:|--:|"]
    for case in CASES:
        ran = figures["cases"].get(case.name, {})
        for way in WAYS if set(WAYS) <= set(ran) else ():
            found = ran[way]
            low, middle, high = found["ms"]
            name, steps = (f"{case.repository} `{case.script}`", found["steps"]) if way == WAYS[0] else ("", "")
            time, losses = f"{middle:g} ({low:g} to {high:g})", f"{found['first']:.4f} | {found['last']:.4f}"
            rows.append(f"| {name} | {steps} | {way} | {time} | {losses} |")
    return "\n".join(rows) + "\n" if rows[2:] else "No figures are committed yet.\n"


def read() -> dict[str, Any]:
    """What was measured so far."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {"about": {}, "cases": {}}


def main() -> None:
    """See above."""
    folder, *names = sys.argv[1:] or [""]
    figures, about = read(), machine.about("cpu")
    if folder and figures["about"] != about:
        figures = {"about": about, "cases": {}}
    for case in CASES if folder else ():
        for way in WAYS if case.name in (names or [case.name]) else ():
            found = summary(run(case, way, Path(folder)))
            figures["cases"].setdefault(case.name, {})[way] = found
            print(case.name, way, found, flush=True)
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(TABLE.sub(lambda _: table(figures), PAGE.read_text()))


if __name__ == "__main__":
    main()
