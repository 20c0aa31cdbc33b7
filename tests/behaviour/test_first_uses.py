"""The first use of ampcompile in a process, in modes, hooks, transforms and checkpoints, leaves the process as any."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.first_uses import CONTEXTS, NAMES

Use = Callable[[str, str], dict[str, Any]]
OTHER_NUMBERS = {"inference mode", "no_grad", "a fake mode", "autocast", "vmap"}
"""Contexts in which a call records no gradients, computes none, gives 16 bits, or knows no autocast."""


@pytest.fixture(scope="module")
def use() -> Iterator[Use]:
    """Make a use the first one of a new process."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("first_uses.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(context: str, name: str) -> dict[str, Any]:
            process.stdin.write(json.dumps([context, name]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def check(use: Use, context: str, name: str, usual: dict[str, Any]) -> None:
    answer = use(context, name)
    assert answer["status"] == 0 and answer["after"] == usual["after"], (context, name, answer)
    assert isinstance(answer["inside"], list), (context, name, answer["inside"])
    if context not in OTHER_NUMBERS or name in NAMES:
        assert answer["inside"] == usual["inside"], (context, name)


@pytest.fixture(scope="module")
def usual(use: Use) -> dict[str, Any]:
    answer = use("nothing", "call")
    assert answer["status"] == 0 and answer["after"][-2:] == ["0 casts", "copies"], answer
    return answer


@pytest.mark.parametrize("context", list(CONTEXTS)[1:])
def test_a_first_call_in_a_context_changes_no_later_one(use: Use, usual: dict[str, Any], context: str) -> None:
    check(use, context, "call", usual)
