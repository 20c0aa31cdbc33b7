"""Training ends where it does without values that are kept in 8 bits."""

import pytest

from proof.convergence import saved
from proof.convergence.masters import distance
from proof.results import Verdict, find_records, read_verdicts


def verdict(seed: int, apart: float) -> Verdict:
    return Verdict(f"GPT, seed {seed}", figures={saved.USUAL: [2.0, 1000], saved.NARROW: [2.0 + apart, 600]})


def test_what_ends_apart_by_more_than_its_scatter_does_not_hold() -> None:
    assert "| -0.10 ± 0.10 | 0.60 | yes |  |" in saved.tabulate([verdict(0, 0.0), verdict(1, -2e-4)])
    assert "| +2.00 ± 0.10 | 0.60 | no |  |" in saved.tabulate([verdict(0, 2.1e-3), verdict(1, 1.9e-3)])


def test_a_run_that_keeps_as_much_as_before_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "train", lambda name, seed, how, draws: (2.0, 1000))
    assert [failure.kind for failure in saved.run("GPT, seed 1").failures] == ["bytes"]
    assert [failure.kind for failure in saved.run(f"{saved.CLASSIFIER}, seed 1").failures] == ["bytes", "control"]


def test_the_committed_runs_are_all_there_and_hold() -> None:
    found = read_verdicts(find_records("saved"))
    assert sorted(verdict.group for verdict in found) == sorted(saved.PART.groups(False))
    for name in (*saved.MODELS, saved.CLASSIFIER):
        runs = [verdict for verdict in found if verdict.group.startswith(f"{name}, ")]
        assert saved.holds(*distance(runs, saved.NARROW, saved.USUAL))
    assert not any(verdict.failures for verdict in found)
