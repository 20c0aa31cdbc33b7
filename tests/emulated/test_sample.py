"""A sample of the tests marked gpu passes on the made-up GPU, in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from softgpu import choice

SAMPLE = (
    "tests/weights/test_gpu.py",
    "tests/kernels/test_cast_many.py",
    "tests/scaler/test_gpu.py::test_two_devices_decide_together",
    "tests/behaviour/test_gpt_training.py::test_copies_are_refreshed_where_they_are",
)


@pytest.mark.slow  # `make emulated SAMPLE=1`, which CI runs, has them too
@pytest.mark.skipif(bool(choice.why_none()), reason=choice.why_none() or "none")
def test_a_sample_passes():
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-p", "no:xdist", *SAMPLE]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Its folder goes first: Python then starts the device before another folder's module of that name imports torch.
    paths = os.pathsep.join([str(choice.START), os.environ.get("PYTHONPATH", "")])
    environment |= {choice.NAME: choice.MADE_UP, "PYTHONPATH": paths}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 24 and "skipped" not in run.stdout
