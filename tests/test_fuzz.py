"""`make test` draws the same numbers in each run, another seed others."""

import os
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


def drawn(folder: Path, seed: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != SEED} | {"PYTHONPATH": str(fuzz.ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:xdist", "-p", "no:cacheprovider", str(folder)],
        cwd=folder, env=environment | ({} if seed is None else {SEED: seed}), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if line.startswith("drew")]


@pytest.mark.ci
def test_the_same_numbers_in_each_run_and_others_for_another_seed(suite: Path) -> None:
    first, other = drawn(suite, None), drawn(suite, "5")
    assert len(first) > 100
    assert first == drawn(suite, FIXED)
    assert not {*first} & {line for line in other if " 0." in line}, "every tensor is another"


def test_every_two_values_meet() -> None:
    values = [range(5), range(2), range(8), range(3)]
    cases = pairs(*values)
    assert len(cases) < 50, "of 240"
    for i, first in enumerate(values):
        for j, second in enumerate(values[:i]):
            assert {(case[i], case[j]) for case in cases} == {(a, b) for a in first for b in second}
    assert (1, 1) not in [case[:2] for case in pairs([0, 1], [0, 1], [0, 1], allowed=lambda a, b, _: not (a and b))]
