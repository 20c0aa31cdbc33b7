"""The scaler's Triton kernels: their numbers in Triton's interpreter, their machine code from its compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def python(*arguments: str, **environment: str) -> None:
    """Run in a process of its own: the interpreter is chosen before Triton is imported, and a bad pointer kills."""
    environment = {**os.environ, **environment}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_numbers_in_the_interpreter():
    python("-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_step.py"), TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_machine_code(capability):
    python("-m", "tests.kernels.triton.compiled_step", capability, TRITON_INTERPRET="0")
