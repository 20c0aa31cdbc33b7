"""Peers on small models take turns, each in processes of its own; who doesn't run in 16 bits is found out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import small_steps as module
from benchmarks.candidate import UnfairError
from benchmarks.small_steps import CALL, STEP, SmallCandidate, measure


@pytest.mark.parametrize("what", [STEP, CALL])
def test_eager_peers_compute_in_the_type_they_claim(what: str) -> None:
    for peer, low in (("eager fp32", False), ("eager autocast", True)):
        candidate = SmallCandidate("MLP 3x64", what, peer)
        figures = candidate.prepare()
        assert bool(figures["casts"]) == low == (figures["error"] > 1e-4)
        assert candidate.begin("case") > 0 and candidate.round(3) > 0 and candidate.end() == {"recompiled": 0}


def test_a_step_trains() -> None:
    candidate = SmallCandidate("SAC", STEP, "eager fp32")
    candidate.prepare()
    before = [p.clone() for p in candidate.parameters()]
    candidate.round(2)
    assert not any(torch.equal(p, was) for p, was in zip(candidate.parameters(), before, strict=True))


@pytest.mark.parametrize("what", [STEP, CALL])
def test_ours_multiplies_in_16_bits_or_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SmallCandidate("MLP 3x64", what, "amp").prepare()
    assert figures["low_products"] >= 3 and figures["graphs"] == 1 and 1e-4 < figures["error"] < 0.1
    torch._dynamo.reset()
    monkeypatch.setattr(module, "check_fairness", lambda *_: None)
    candidate = SmallCandidate("MLP 3x64", what, "Inductor + autocast")
    candidate._around = lambda: torch.autocast("cpu", enabled=False)
    with pytest.raises(UnfairError, match="found 0 products in 16 bits"):
        candidate.prepare()


@pytest.mark.slow
def test_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = iter(range(9))

    @contextmanager
    def caches() -> Iterator[Path]:
        yield tmp_path / str(next(folders))

    monkeypatch.setattr(module, "NAMES", ("eager fp32", "eager autocast"))
    monkeypatch.setattr(module, "STARTS", 2)
    full, low = measure("MLP 3x64", CALL, caches)
    assert full.case == low.case == "MLP 3x64: call without gradients"
    assert len(full.figures["seconds"]) == len(low.figures["seconds"]) == 2 * 7
