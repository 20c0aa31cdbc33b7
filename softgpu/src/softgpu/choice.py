"""Which GPU the tests marked `gpu` run on: a real one, or, where torch is built without CUDA, the made-up one.

The environment variable AMPCOMPILE_TEST_GPU says "made-up", on any build, or "real"; without it, `pytest -m gpu` on a
CPU build makes one up. What is chosen holds for subprocesses too. Imports no torch: the device must be there before it.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from .device import library, start

NAME = "AMPCOMPILE_TEST_GPU"
MADE_UP, REAL = "made-up", "real"
START = Path(__file__).parents[2] / "start"
"""The folder whose `sitecustomize.py` starts the device in subprocesses."""


def asks_for_gpus(argv: list[str]) -> bool:
    """Whether pytest is asked for the tests marked gpu, by what it will read itself later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m")
    chosen = parser.parse_known_args(argv)[0].m or ""
    return any(mark in chosen.replace(f"not {mark}", "") for mark in ("gpu", "emulated"))


def is_made_up() -> bool:
    return os.environ.get(NAME) == MADE_UP


def why_none() -> str:
    """Why no GPU is made up here unless it is asked for, or nothing."""
    version, cuda = library.torch_version()
    return f"torch {version} is a build for CUDA {cuda}: {NAME}={MADE_UP} would make one up" if cuda else ""


def choose() -> None:
    """Call before torch is imported: start the device in this process if it is chosen."""
    by_pytest = "pytest" in sys.modules and "pytest" in Path(sys.argv[0]).parts[-2:]
    if NAME not in os.environ and by_pytest and not why_none():
        argv = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *sys.argv[1:]]
        if asks_for_gpus(argv):
            os.environ[NAME] = MADE_UP
    if is_made_up():
        ways = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(START) not in ways:  # subprocesses have it from there; this process was begun without
            os.environ["PYTHONPATH"] = os.pathsep.join([str(START), *filter(None, ways)])
            start.begin()
