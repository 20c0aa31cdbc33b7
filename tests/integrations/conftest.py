"""Accelerate keeps one state for the process; each test begins with none, and with nothing compiled."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_state():
    torch.compiler.reset()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(True)
