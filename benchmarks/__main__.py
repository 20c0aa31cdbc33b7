"""python -m benchmarks [PLAN]     peers on models: cpu (the default), calls (what a call costs the host), gpu
python -m benchmarks gpu-check  the tests that need a GPU, then the plan gpu, in the order of what a GPU is asked first;
                                goes on where it was cut off. --tiny rehearses it, on the made-up GPU too:
                                AMPCOMPILE_TEST_GPU=made-up PYTHONPATH=softgpu/start
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
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks import machine, race, scaler_step
from benchmarks.architectures import TINY
from benchmarks.peers import BASELINE
from benchmarks.plans import LEADING, OTHERS, PLANS, Work, pack, shrink
from benchmarks.records import Records
from benchmarks.tables import tabulate, tabulate_steps


@dataclass(frozen=True)
class Tests:
    """Tests that a GPU is to run."""

    name: str
    mark: str
    paths: tuple[str, ...]
    rehearsed: tuple[str, ...]
    """Some of them, of seconds on a made-up GPU."""
    seconds: float


BUILT = machine.ROOT / "build" / "benchmarks"
ON_GPU = Tests("tests that need a GPU", "gpu", ("tests",), ("tests/weights/test_gpu.py",), 100.0)
CHAINS = Tests(
    "drawn chains",
    "emulated",
    ("tests/emulated/test_chains.py",),
    ("tests/emulated/test_chains.py::test_fusing_changes_no_bit[0-dtype0]",),
    150.0,
)
TESTS = (ON_GPU.name, CHAINS.name)
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
    parser.add_argument("--tiny", action="store_true", help="tiny models: tries it, its times mean nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would be cut off then")
    parser.add_argument("--file", type=Path, help="of the results (default: build/benchmarks/PLAN.json)")
    options = parser.parse_args(arguments)
    options.gpu = options.plan in ("gpu", "gpu-check")
    if options.gpu and not options.tiny and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device; --tiny tries the plan on the CPU")
    on_cpu = options.plan in ("cpu", "calls") or (options.tiny and not options.gpu) or not torch.cuda.is_available()
    options.device = "cpu" if on_cpu else "cuda"
    name = f"{options.plan.removesuffix('-check')}{'-tiny' if options.tiny else ''}.json"
    options.file = options.file or BUILT / name
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print tables; 1 if works are left for another run, or a test failed."""
    options, began = parse(arguments), monotonic()
    records = Records.resume(options.file, machine.about(options.device))
    left = _measure(options, records, began + options.seconds)
    print(show(records), f"{left} works are left: run it again" if left else "nothing is left", sep="\n")
    failed = any(records.stages.get(name, {}).get("pytest", {}).get("status") for name in TESTS)
    return int(left > 0 or failed)


def run_gpu_tests(
    paths: Sequence[str], seconds: float = 100.0, processes: int = PROCESSES, mark: str = "gpu"
) -> dict[str, Any]:
    """The last line of pytest, its status (`STOPPED` where time was up), and the names of what failed."""
    plugins = all(importlib.util.find_spec(name) for name in ("xdist", "pytest_timeout"))
    command = [sys.executable, "-P", "-m", "pytest", "-m", mark, "-rfE", *paths]
    command += ["-n", str(processes), f"--timeout={seconds:.0f}"] if plugins else []
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
        for model in ("GPT 124M",) if options.device == "cuda" else ("GPT 23M", "ResNet-50"):
            if options.only in model:
                scaler_step.measure(TINY * options.tiny + model, options.device, records)
        return 0
    if options.plan != "gpu-check":
        return _race(PLANS[options.plan], options, records, until)
    left = 0
    parts: list[tuple[Any, Any]] = [(_test, ON_GPU), (_race, LEADING), (_test, CHAINS), (_race, OTHERS)]
    for measure, what in parts:
        left += measure(what, options, records, 0.0 if left else until)
    return left


def _test(tests: Tests, options: argparse.Namespace, records: Records, until: float) -> int:
    """Note what some tests say, if it isn't noted; returns 1 if there is no time for them."""
    if tests.name in records.stages:
        return 0
    if monotonic() + tests.seconds > until:
        return 1
    paths = tests.rehearsed if options.tiny else tests.paths
    seconds, processes = (600.0, 1) if options.tiny else (tests.seconds, PROCESSES)
    records.add(tests.name, "pytest", **run_gpu_tests(paths, seconds, processes, tests.mark))
    return 0


def _race(works: Sequence[Work], options: argparse.Namespace, records: Records, until: float) -> int:
    works = [shrink(work) if options.tiny else work for work in works]
    works = [
        replace(work, peers=tuple(name for name in work.peers if name == BASELINE or options.peers in name))
        for work in works
        if options.only in work.name
    ]
    groups, together = [[work] for work in works], options.device == "cuda" and not options.tiny
    if together:
        groups = list(pack(works, 0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30))
    return race.run(groups, records, options.device, BUILT / "caches", options.rounds, together, until)


def show(records: Records) -> str:
    """All results as text: a table for each case, the machine above; below one of all steps on a GPU."""
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in records.about.items() if value)
    said = [f"{name}: {records.stages[name]['pytest']['said']}" for name in TESTS if name in records.stages]
    cases = {stage: peers for stage, peers in records.stages.items() if stage not in TESTS}
    parts = [f"{stage}\n\n{tabulate(peers)}" for stage, peers in cases.items()]
    return "\n\n".join(filter(None, [head, *said, *parts, tabulate_steps(cases)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
