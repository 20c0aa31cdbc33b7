"""Python imports this as it starts, in the subprocesses of a test that runs on the made-up GPU: they get it too."""

import os
import sys
from pathlib import Path

if os.environ.get("AMPCOMPILE_TEST_GPU") == "made-up":
    ROOT = str(Path(__file__).parents[3])
    sys.path.insert(0, ROOT)
    try:
        from tests.softgpu.device import start

        start.begin()
    finally:
        sys.path.remove(ROOT)
