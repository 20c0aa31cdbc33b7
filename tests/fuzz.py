"""python -m tests.fuzz [--minutes M] [--draws N] [--seed S] [TESTS ...]   the suite's tests with other inputs.

Round after round, each with a seed of its own, every test that draws random inputs runs one of its cases, until the
time is over or there were N draws in all. What was drawn is noted in `.fuzz/`, and the next call goes on from there;
`--seed` begins anew. What fails runs again by itself, and a line says how to repeat it. Exits with 1 if anything did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.conftest import SEED, without_case

ROOT = Path(__file__).parents[1]
CORE = [f"--ignore=tests/{folder}" for folder in ("benchmarks", "examples", "proof")]
"""What `make test` runs."""


@dataclass
class State:
    """What was run so far: rounds, draws, failures by what repeats them, and tests that draw nothing."""

    seed: int
    rounds: int = 0
    draws: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    undrawn: list[str] = field(default_factory=list)


def read(file: Path, seed: int | None) -> State:
    """The state to go on from."""
    if seed is None and file.exists():
        return State(**json.loads(file.read_text()))
    return State(random.SystemRandom().randrange(1, 10**6) * 1000 if seed is None else seed)


def run_round(state: State, folder: Path, tests: list[str], jobs: int, end: float) -> None:
    """Run one case of each test, with the next seed, until it is `end` by the clock."""
    seed, report, without = state.seed + state.rounds, folder / "round.xml", folder / "undrawn.txt"
    without.write_text("\n".join(state.undrawn))
    report.unlink(missing_ok=True)
    options = ["-m", "not slow", "-n", str(jobs), "--timeout=600", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    options += [f"--until={end}"] if end < float("inf") else []
    command = [sys.executable, "-P", "-m", "pytest", *options, f"--one-case={without}", *(tests or CORE)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {SEED: str(seed)}, stdout=subprocess.DEVNULL)
    if not report.exists():
        raise SystemExit(f"pytest exits with {run.returncode} and reports nothing: {shlex.join(command)}")
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        name = f"{file}::{case.get('name')}"
        drew = case.find("properties/property[@name='draws']") is not None
        if not drew:
            state.undrawn.append(without_case(name))
            continue
        state.draws += 1
        if (broken := case.find("failure") if case.find("failure") is not None else case.find("error")) is not None:
            state.failures[repetition(seed, name, jobs)] = broken.get("message", "").strip().splitlines()[0][:200]
    state.rounds += 1


def repetition(seed: int, name: str, jobs: int) -> str:
    """The line that repeats a failure, or says that it needs the tests before it."""
    again = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", name], cwd=ROOT, env=os.environ | {SEED: str(seed)}, capture_output=True
    )
    alone = f'make test SEED={seed} ARGS="{shlex.quote(name)}"'
    return alone if again.returncode else f"{alone}  # passes alone: failed after other tests, with -n {jobs}"


def main() -> int:
    """Draw until the time is over; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--draws", type=int, default=0, help="in all, those of earlier calls included")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 2, 8))
    parser.add_argument("--folder", type=Path, default=ROOT / ".fuzz")
    parser.add_argument("tests", nargs="*")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    state, end = read(file := given.folder / "state.json", given.seed), time.time() + 60 * given.minutes
    print(f"seed {state.seed}: {state.draws} draws so far", flush=True)
    while time.time() < end and (not given.draws or state.draws < given.draws):
        before = state.draws
        run_round(state, given.folder, given.tests, given.jobs, end)
        file.write_text(json.dumps(asdict(state), indent=1))
        if state.draws == before:
            break
    print(f"{state.draws} draws in {state.rounds} rounds from seed {state.seed}: {len(state.failures)} failed")
    for line, message in state.failures.items():
        print(f"  {line}\n      {message}")
    return int(bool(state.failures))


if __name__ == "__main__":
    sys.exit(main())
