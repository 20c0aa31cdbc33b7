"""What `import ampcompile` adds to `import torch`."""

import subprocess
import sys

from benchmarks.peers import AMP
from benchmarks.records import Row

SCRIPT = """
import time, torch
start = time.perf_counter()
import ampcompile
print(time.perf_counter() - start)
"""


def measure(rounds: int = 7) -> list[Row]:
    """Seconds of the import in new processes that have imported torch; the first, which fills caches, isn't counted."""
    command = [sys.executable, "-c", SCRIPT]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(rounds + 1)]
    return [Row("import ampcompile, after torch", AMP, {"seconds": [float(run.stdout) for run in runs[1:]]})]
