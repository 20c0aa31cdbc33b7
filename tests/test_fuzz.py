"""`make test` draws the same numbers in each run, `make fuzz` others, and what fails there can be repeated."""

import json
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


@pytest.mark.ci
def test_what_fails_is_told_with_what_repeats_it(suite: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(fuzz, "ROOT", suite)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    call = ["fuzz", "--folder", str(suite / "noted"), "--jobs", "0", "test_made_up.py"]
    monkeypatch.setattr(sys, "argv", [*call, "--seed", "1", "--draws", "3"])
    fuzz.main()
    state = json.loads((suite / "noted" / "state.json").read_text())
    assert state["rounds"] == 2 and state["draws"] == 4, "two of the three tests draw, one case of each a round"
    assert state["undrawn"] == ["test_made_up.py::test_that_draws_nothing"]
    monkeypatch.setattr(sys, "argv", [*call, "--draws", "6"])
    assert fuzz.main() == 1
    state = json.loads((suite / "noted" / "state.json").read_text())
    assert state["rounds"] == 3 and 1 <= len(state["failures"]) <= 3, "nearly all draws fail"
    line, message = next(iter(state["failures"].items()))
    assert line.startswith("make test SEED=") and "#" not in line, "it fails alone, too"
    assert "assert tensor" in message
    assert line in capsys.readouterr().out


def test_every_two_values_meet() -> None:
    values = [range(5), range(2), range(8), range(3)]
    cases = pairs(*values)
    assert len(cases) < 50, "of 240"
    for i, first in enumerate(values):
        for j, second in enumerate(values[:i]):
            assert {(case[i], case[j]) for case in cases} == {(a, b) for a in first for b in second}
    assert (1, 1) not in [case[:2] for case in pairs([0, 1], [0, 1], [0, 1], allowed=lambda a, b, _: not (a and b))]
