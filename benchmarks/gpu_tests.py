"""The tests that need a GPU, in so many processes, with a limit in all."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import ROOT

PROCESSES = 12
SECONDS = 100.0


def run(paths: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """What pytest says last, its status (124: it was stopped), and the names of what failed."""
    plugins = all(importlib.util.find_spec(name) for name in ("xdist", "pytest_timeout"))
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-rfE", *paths]
    command += ["-n", str(PROCESSES), "--timeout=60"] if plugins else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds)
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        status, said = 124, (stopped.stdout or b"").decode(errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    nothing_to_run = 5
    return {"status": 0 if status == nothing_to_run else status, "said": lines[-1] if lines else "", "failed": failed}
