"""`make test` draws the same numbers in each run, another seed others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fuzz
from tests.conftest import FIXED, SEED
from tests.pairs import pairs

TESTS = """
import pytest, torch
from hypothesis import given, strategies as st

@pytest.mark.parametrize("case", range(50))
def test_that_fails_for_some_inputs(case):
    print("drew", case, torch.rand(()).item())
    assert torch.rand(()) > 0.9

@given(st.lists(st.integers(), min_size=3))
def test_of_hypothesis(values):
    print("drew", values)

def test_that_draws_nothing():
    pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with these tests, and this suite's conftest."""
    conftest = (
        "from tests.conftest import isolated, pytest_addoption, pytest_collection_modifyitems, pytest_configure\n"
    )
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_made_up.py").write_text(TESTS)
    return tmp_path


RUNS = """
import os, pytest, sys
seed, values, folder = sys.argv[1:]
for value in values.split():
    os.environ.pop(seed, None)
    os.environ |= {} if value == "none" else {seed: value}
    print("seed", value)
    assert pytest.main(["-rA", "-p", "no:xdist", "-p", "no:cacheprovider", folder]) in (0, 1)
"""


@pytest.mark.ci
def test_the_same_numbers_in_each_run_and_others_for_another_seed(suite: Path) -> None:
    """Runs of one process, most of whose time are imports; what Hypothesis is told to begin with it never forgets."""
    environment = os.environ | {"PYTHONPATH": str(fuzz.ROOT)}
    command = [sys.executable, "-c", RUNS, SEED, f"none {FIXED} 5", str(suite)]
    run = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    runs = [each.splitlines() for each in re.split(r"^seed \w+$", run.stdout, flags=re.MULTILINE)[1:]]
    first, again, other = ([line for line in lines if line.startswith("drew")] for lines in runs)
    assert len(first) > 100
    assert first == again
    assert not {*first} & {line for line in other if " 0." in line}, "every tensor is another"


def test_every_two_values_meet() -> None:
    values = [range(5), range(2), range(8), range(3)]
    cases = pairs(*values)
    assert len(cases) < 50, "of 240"
    for i, first in enumerate(values):
        for j, second in enumerate(values[:i]):
            assert {(case[i], case[j]) for case in cases} == {(a, b) for a in first for b in second}
    assert (1, 1) not in [case[:2] for case in pairs([0, 1], [0, 1], [0, 1], allowed=lambda a, b, _: not (a and b))]
