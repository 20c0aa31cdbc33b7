"""Python imports this as it starts, in the subprocesses of a test that runs on the made-up GPU: they get it too."""

import os
import sys
from pathlib import Path

if os.environ.get("AMPCOMPILE_TEST_GPU") == "made-up":
    SOURCE = str(Path(__file__).parents[1] / "src")
    sys.path.insert(0, SOURCE)
    try:
        from softgpu.device import start

        start.begin()
    finally:
        sys.path.remove(SOURCE)
