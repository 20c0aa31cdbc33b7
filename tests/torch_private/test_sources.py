"""Ops are defined without a search through all modules that are loaded, and torch still knows where."""

import subprocess
import sys

import pytest

SCRIPT = """
import inspect
import torch._inductor.compile_fx
from torch._library.simple_registry import singleton
looked, ismodule = [], inspect.ismodule
inspect.ismodule = lambda value: looked.append(value) or ismodule(value)
import ampcompile.backend, ampcompile.passes.after.record_magnitudes
ops = [singleton.find(f"ampcompile::{name}") for name in ("packed_linear", "watched")]
print(len(looked), *(op.fake_impl.kernel.source for op in ops))
"""


@pytest.mark.ci
def test_importing_the_backend_searches_no_modules_and_ops_know_their_files() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    looks, *sources = run.stdout.split()
    assert int(looks) < 1000  # one search looks at some thousand modules
    files = ["/".join(source.partition(":")[0].split("/")[-2:]) for source in sources]
    assert files == ["kernels/packed_linear.py", "after/record_magnitudes.py"]
