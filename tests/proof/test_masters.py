"""Remainders train as float32 masters by hand."""

import pytest
import torch

from ampcompile.kernels.masters import write_master
from ampcompile.kernels.tables import SPAN
from proof.convergence import masters
from proof.results import find_records, read_verdicts
from tests.proof.shortened import shorten


def test_rounding_by_hand_is_that_of_remainders() -> None:
    draws = torch.randint(-(2**31), 2**31, (SPAN, 64), dtype=torch.int32).view(torch.float32)
    ties = (torch.arange(SPAN, dtype=torch.int32) << 20 | 0x8000).view(torch.float32).unsqueeze(1)
    numbers = torch.cat([draws, -draws, ties, -ties], 1).flatten()
    numbers = numbers[~numbers.isnan()]
    param = torch.empty_like(numbers, dtype=torch.bfloat16)
    checksums = torch.empty(-(-len(param) // SPAN), dtype=torch.int32)
    write_master(param, torch.empty_like(param, dtype=torch.int16), checksums, numbers)
    assert torch.equal(masters.round_ties_away(numbers).view(torch.int16), param.view(torch.int16))
    assert not torch.equal(param, numbers.bfloat16())


def test_a_short_run_has_equal_bits_and_ways_that_end_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 30)
    verdict = masters.run("UNet, seed 0", draws=1)
    assert (
        not verdict.failures and len({tuple(figures) for figures in verdict.figures.values()}) == len(masters.HOWS) - 1
    )


def test_other_bits_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {how: ([3.0, 1.0], [torch.ones(2)], 1.0) for how in masters.HOWS}
    monkeypatch.setattr(masters, "train", lambda name, seed, how, draws: ends[how])
    assert not masters.run("GPT, seed 1").failures
    for other in (([3.5, 1.0], [torch.ones(2)], 1.0), ([3.0, 1.0], [torch.zeros(2)], 1.0)):
        ends['`"remainder"`'] = other
        verdict = masters.run("GPT, seed 1")
        assert [failure.kind for failure in verdict.failures] == ["bits"] and verdict.counts["fails"] == 1
        assert "the same bits" not in masters.tabulate([verdict, verdict])


def test_the_committed_runs_are_all_there_and_remainders_have_equal_bits() -> None:
    found = read_verdicts(find_records("masters"))
    assert sorted(verdict.group for verdict in found) == sorted(masters.groups(False))
    table = masters.tabulate(found)
    assert table.count("the same bits") == len(masters.MODELS)
