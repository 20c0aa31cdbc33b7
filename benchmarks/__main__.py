"""python -m benchmarks [PLAN]     peers on models: cpu (the default), calls (what a call costs the host), gpu
python -m benchmarks gpu-check  the tests that need a GPU, then the plan gpu; goes on where it was cut off
python -m benchmarks scaler     one optimizer step under a GradScaler

Results are printed as tables, and kept as JSON in build/benchmarks: what is there isn't measured again.
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks import machine, race, scaler_step
from benchmarks.peers import BASELINE
from benchmarks.plans import PLANS, pack, shrink
from benchmarks.records import Records
from benchmarks.tables import tabulate

BUILT = machine.ROOT / "build" / "benchmarks"
TESTS = "tests that need a GPU"
PROCESSES = 12
"""Of the tests: one GPU serves some."""
NOTHING_TO_RUN, STOPPED = 5, 124
"""Exit statuses: pytest's where no test was chosen, and ours where time was up."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", nargs="?", default="cpu", choices=[*PLANS, "gpu-check", "scaler"])
    parser.add_argument("--only", default="", help="the works whose names hold this text")
    parser.add_argument("--peers", default="", help="the peers whose names hold this text, beside Inductor's")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: tries it, its times mean nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would be cut off then")
    parser.add_argument("--file", type=Path, help="of the results (default: build/benchmarks/PLAN.json)")
    options = parser.parse_args(arguments)
    options.gpu = options.plan in ("gpu", "gpu-check")
    if options.gpu and not options.tiny and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device; --tiny tries the plan on the CPU")
    on_cpu = options.tiny or options.plan in ("cpu", "calls") or not torch.cuda.is_available()
    options.device = "cpu" if on_cpu else "cuda"
    name = f"{options.plan.removesuffix('-check')}{'-tiny' if options.tiny else ''}.json"
    options.file = options.file or BUILT / name
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print tables; 1 if works are left for another run, or a test failed."""
    options, began = parse(arguments), monotonic()
    records = Records.resume(options.file, machine.about(options.device))
    if options.plan == "gpu-check" and TESTS not in records.stages:
        tests = ["tests/weights/test_gpu.py"] if options.tiny else ["tests"]
        records.add(TESTS, "pytest", **run_gpu_tests(tests, processes=1 if options.tiny else PROCESSES))
    left = _measure(options, records, began + options.seconds)
    print(show(records), f"{left} works are left: run it again" if left else "nothing is left", sep="\n")
    return int(left > 0 or bool(records.stages.get(TESTS, {}).get("pytest", {}).get("status")))


def run_gpu_tests(paths: Sequence[str], seconds: float = 100.0, processes: int = PROCESSES) -> dict[str, Any]:
    """The last line of pytest, its status (`STOPPED` where time was up), and the names of what failed."""
    plugins = all(importlib.util.find_spec(name) for name in ("xdist", "pytest_timeout"))
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-rfE", *paths]
    command += ["-n", str(processes), "--timeout=60"] if plugins else []
    given: Any = {"cwd": machine.ROOT, "env": {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **given) as pytest:
        try:
            said, _ = pytest.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)  # its workers too: they would disturb what is measured next
            said, _ = pytest.communicate()
            pytest.returncode = STOPPED
    lines = [line for line in said.splitlines() if line.strip()]
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    status = 0 if pytest.returncode == NOTHING_TO_RUN else pytest.returncode
    return {"status": status, "said": lines[-1] if lines else "", "failed": failed}


def _measure(options: argparse.Namespace, records: Records, until: float) -> int:
    """Note what the plan asks for; returns how many works are left."""
    if options.plan == "scaler":
        model = "tiny GPT 23M" if options.tiny else "GPT 124M" if options.device == "cuda" else "GPT 23M"
        scaler_step.measure(model, options.device, records)
    else:
        return _race(options, records, until)
    return 0


def _race(options: argparse.Namespace, records: Records, until: float) -> int:
    works = [shrink(work) if options.tiny else work for work in PLANS["gpu" if options.gpu else options.plan]]
    works = [
        replace(work, peers=tuple(name for name in work.peers if name == BASELINE or options.peers in name))
        for work in works
        if options.only in work.name
    ]
    groups, together = [[work] for work in works], options.device == "cuda"
    if together:
        groups = list(pack(works, 0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30))
    return race.run(groups, records, options.device, BUILT / "caches", options.rounds, together, until)


def show(records: Records) -> str:
    """All results as text: a table for each case, the machine above."""
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in records.about.items() if value)
    parts = [f"{stage}\n\n{tabulate(peers)}" for stage, peers in records.stages.items() if stage != TESTS]
    tests = records.stages.get(TESTS, {}).get("pytest", {}).get("said", "")
    return "\n\n".join([head, *([f"{TESTS}: {tests}"] if tests else []), *parts])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
