"""The first use of ampcompile in a process, in modes, hooks, transforms and checkpoints, leaves the process as any."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ampcompile
from tests.behaviour.first_uses import CALLS, CONTEXTS, NAMES, WITHOUT_USE
from tests.conftest import FIXED, SEED

Use = Callable[[str, str], dict[str, Any]]
OTHER_NUMBERS = {"inference mode", "no_grad", "a fake mode", "a fake mode with fakes alone", "autocast", "vmap"}
"""Contexts in which a call records no gradients, computes none, gives 16 bits, or knows no autocast."""
MAY_REFUSE = {"a fake mode", "vmap", "a dispatch mode", "a flop counter", "mutable saved tensors"}
MAY_REFUSE |= {"a fake mode with fakes alone", "a checkpoint", "a selective checkpoint"}
"""Contexts in which an error inside is no fault: masters and exports take no fake tensors, nothing is compiled in
a mode or in vmap, and a backward within a checkpoint runs all of it again."""

OFTEN = {"inference mode", "a fake mode"}
"""Two of the contexts that once left a process without copies, or ended it."""


SELDOM = {"a profiler of shapes", "a profiler of all threads", "hooks that copy", "anomaly mode", "deterministic mode"}
"""Variations of others, and the more seldom of modes."""
LATER = [*[*NAMES][1::2], "call with default options"]
"""Uses that CI leaves to `SLOW=1`: each loads what its neighbour does, and costs a process."""


@pytest.fixture(scope="module")
def use(request: pytest.FixtureRequest) -> Iterator[Use]:
    """Make a use the first one of a new process, which has loaded so much."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("first_uses.py")), *filter(None, [request.param])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(context: str, name: str) -> dict[str, Any]:
            process.stdin.write(json.dumps([context, name]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def usual(use: Use) -> dict[str, Any]:
    answer = use("nothing", "call")
    assert answer["status"] == 0 and answer["after"][-2:] == ["0 casts", "copies"], answer
    return answer


@pytest.mark.parametrize("use", [""], indirect=True, ids=["torch"], scope="module")
@pytest.mark.parametrize(
    "context",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow if name in SELDOM else pytest.mark.ci)
        for name in list(CONTEXTS)[1:]
    ],
)
def test_a_first_call_in_a_context_changes_no_later_one(use: Use, usual: dict[str, Any], context: str) -> None:
    answer = use(context, "call")
    assert answer["status"] == 0 and answer["after"] == usual["after"], answer
    assert isinstance(answer["inside"], list), answer["inside"]
    assert context in OTHER_NUMBERS or answer["inside"] == usual["inside"]


@pytest.mark.parametrize("use", ["compiler"], indirect=True, ids=["compiler"], scope="module")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LATER else pytest.mark.ci) for n in (*CALLS, *NAMES)]
)
def test_a_first_use_in_a_drawn_context_changes_no_later_call(use: Use, usual: dict[str, Any], name: str) -> None:
    """`make fuzz` tries all contexts of a name that it draws."""
    contexts, drawn = list(CONTEXTS), random.choice(list(CONTEXTS)[1:])
    for context in [drawn] if os.environ[SEED] == FIXED else contexts:
        answer = use(context, name)
        assert answer["status"] == 0 and answer["after"] == usual["after"], (context, answer)
        assert isinstance(answer["inside"], list) or context in MAY_REFUSE, (context, answer["inside"])


def test_each_public_name_has_a_use() -> None:
    names = {name for name in ampcompile.__all__ if not name.endswith(("Error", "Warning"))}
    assert NAMES.keys() | WITHOUT_USE == names | {"optim"}
