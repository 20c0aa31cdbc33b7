"""The tests that need a GPU, in so many processes, with a limit in all."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import ROOT

PROCESSES = 12
SECONDS = 100.0
NOTHING_TO_RUN, STOPPED = 5, 124
"""Exit statuses: pytest's where no test was chosen, and ours where time was up."""


def run(paths: Sequence[str], seconds: float = SECONDS, processes: int = PROCESSES) -> dict[str, Any]:
    """The last line of pytest, its status (`STOPPED` where time was up), and the names of what failed."""
    plugins = all(importlib.util.find_spec(name) for name in ("xdist", "pytest_timeout"))
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-rfE", *paths]
    command += ["-n", str(processes), "--timeout=60"] if plugins else []
    pipe, environment = subprocess.PIPE, {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with subprocess.Popen(command, stdout=pipe, text=True, cwd=ROOT, env=environment, start_new_session=True) as pytest:
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
