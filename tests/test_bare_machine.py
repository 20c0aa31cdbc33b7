"""A GPU machine without network has torch, triton, numpy, pytest and this package: there every GPU test is found."""

import os
import subprocess
import sys

import pytest

# The import system finds nothing under these names.
WITHOUT = """
import functools, sys
from importlib.machinery import PathFinder
def find_spec(find, lacking, name, path=None, target=None):
    return None if name.partition(".")[0] in lacking else find(name, path, target)
PathFinder.find_spec = functools.partial(find_spec, PathFinder.find_spec, sys.argv[1].split())
"""
LACKING = "hypothesis rich transformers sklearn matplotlib expecttest accelerate playwright xdist pytest_timeout"
LACKING += " mypy ruff"
COLLECT = "import pytest, sys; sys.exit(pytest.main(['-m', 'gpu', '--collect-only', 'tests']))"


def collected(lacking: str) -> tuple[set[str], str]:
    command = [sys.executable, "-P", "-c", WITHOUT + COLLECT, lacking]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return {line for line in run.stdout.splitlines() if "::" in line}, run.stdout


@pytest.mark.slow
def test_every_gpu_test_is_collected_there() -> None:
    (everywhere, _), (there, told) = collected(""), collected(LACKING)
    assert len(there) > 200 and there == everywhere
    assert "for want of hypothesis, rich, sklearn, transformers" in told
