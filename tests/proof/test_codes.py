"""Codes of optimizer states lose little, in closed loop and in training, as the committed runs show."""

import pytest

from ampcompile.optim import states as product
from proof.convergence import codes, masters, states
from proof.results import find_records, read_verdicts
from tests.proof.shortened import shorten
from tests.test_layout import ROOT


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_least_numbers", "LEAST_ROW"):
        monkeypatch.setattr(product, name, getattr(product, name))


@pytest.mark.parametrize("name", [*codes.SUBJECTS, codes.ONE_SIZE])
def test_each_code_has_errors_of_its_own_and_ours_are_small(name: str) -> None:
    figures = codes.run(f"{name}, 0.95", 6).figures
    errors = [error for error, _ in figures.values()]
    assert len(set(errors)) == len(codes.CODES) and 0 < figures[codes.OURS][0] < 0.05 and min(errors) > 0


def test_the_committed_loops_hold_and_linear_codes_dont() -> None:
    found = {verdict.group: verdict for verdict in read_verdicts(find_records("codes"))}
    assert sorted(found) == sorted(codes.groups(False)) and not any(verdict.failures for verdict in found.values())
    kinds = set()
    for group, verdict in found.items():
        beta2 = float(group.rpartition(", ")[2])
        assert not codes.judge(beta2, verdict.figures)
        control = verdict.figures | {codes.OURS: verdict.figures[codes.LINEAR]}
        kinds |= {(beta2, failure.kind) for failure in codes.judge(beta2, control)}
    assert {(0.9999, "error"), (0.999, "error"), (0.999, "size"), (0.95, "error")} <= kinds


def test_a_short_run_ends_elsewhere_with_each_code(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 8)
    figures = states.run("UNet, seed 0", draws=1).figures
    assert len({end for (end,) in figures.values()}) == len(states.HOWS)


def test_the_page_has_the_errors_of_the_committed_loops() -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    for verdict in read_verdicts(find_records("codes")):
        for way, (error, size) in verdict.figures.items():
            assert (f" {error:.3f}" if "0.95" in verdict.group else f" {error:.3f}, {size:.3f} |") in page, way


@pytest.mark.parametrize("how", states.HOWS[1:])
@pytest.mark.parametrize("name", masters.MODELS)
def test_the_committed_runs_end_where_those_with_float32_states_do(name: str, how: str) -> None:
    found = [verdict for verdict in read_verdicts(find_records("states")) if verdict.group.startswith(f"{name}, ")]
    apart, error = masters.distance(found, how, states.FLOAT32)
    assert abs(apart) <= 0.5 or (abs(apart) <= 2 * error and error <= 1)
