"""The race: every candidate is timed, none leaves anything behind, one that fails says so."""

import json
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ampcompile.command_line import bench as cli_bench
from ampcompile.command_line.bench import Results, Target, Times, bench


class _Eager:
    """torch.compile without a compiler: what is tested here is the race."""

    def __init__(self, f: Any, **_: Any) -> None:
        self.f = f

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> type[_Eager]:
    monkeypatch.setattr(torch, "compile", _Eager)
    return _Eager


@pytest.mark.usefixtures("eager")
def test_bench_times_every_candidate_and_leaves_no_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    seen: list[tuple[bool, bool]] = []
    model.register_forward_hook(lambda *_: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    statistics = model[1].running_mean.clone()
    results = bench(Target(model, (x,), {}), {}, True, 0.01, print)
    assert results.work == "training" and results.dtype == "bf16"
    names = "eager float32, eager autocast, Inductor in float32, Inductor with autocast, amp"
    assert ", ".join(c.name for c in results.candidates) == names
    assert all(len(c.seconds) >= cli_bench.ROUNDS and c.median > 0 and not c.failed for c in results.candidates)
    assert {(True, True), (True, False)} == set(seen)
    assert results.as_dict()["advice"] in cli_bench.table(results).splitlines()[-1] != ""
    assert all(p.grad is None for p in model.parameters()) and torch.equal(statistics, model[1].running_mean)
    seen.clear()
    assert bench(Target(model.eval(), (x,), {}), {}, True, 0.01, print).work == "inference"
    assert {grad for grad, _ in seen} == {False}


@pytest.mark.usefixtures("eager")
def test_bench_says_where_the_time_goes_if_it_is_asked() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(16, 64)
    results = bench(Target(model, (x,), {}), {}, True, 0.01, print, profile=True)
    for each, plain in zip(results.candidates, results.as_dict()["candidates"], strict=True):
        assert each.profile is not None and each.profile.trace.seconds["products"] > 0
        assert plain["profile"]["advice"] == each.profile.advice
    *_, head, table, last = cli_bench.table(results).split("\n\n")
    assert head == "where the time goes" and table.splitlines()[-1].startswith("amp  ")
    assert last == f"amp: {results.candidates[-1].profile.advice}"
    assert json.loads(json.dumps(results.as_dict()))["candidates"][0]["profile"]["wall"] > 0


def test_a_candidate_that_fails_says_so_and_the_others_go_on(eager: type[_Eager]) -> None:
    with mock.patch.object(eager, "__call__", side_effect=RuntimeError("no compiler\nat all")):
        results = bench(Target(nn.Linear(8, 8), (torch.randn(4, 8),), {}), {}, True, 0.01, print)
    assert [c.failed for c in results.candidates] == ["", "", *["RuntimeError: no compiler"] * 3]
    assert "amp failed: RuntimeError: no compiler" in cli_bench.table(results).splitlines()


ADVICE = {
    2.0: "amp is the fastest here: 2.00 times as fast as Inductor with autocast, 4.00 times as fast as I",
    1.0: "no difference between amp and Inductor with autocast was shown: amp is 1.00 times as fast as Inductor wi",
    0.5: "Inductor with autocast is the fastest here, 2.00 times as fast as amp: use torch.compile(model) under t",
}


def times(name: str, scale: float) -> Times:
    return Times(name, 0.1, [scale * second for second in (1.0, 1.1, 0.9, 1.0, 1.0)])


@pytest.mark.parametrize("theirs", ADVICE)
def test_the_advice_is_the_tables(theirs: float) -> None:
    amp = Times("amp", 0.1, [1.1, 1.0, 1.0, 1.0, 0.9])
    rivals = times("Inductor in float32", 2 * theirs), times("Inductor with autocast", theirs)
    assert cli_bench.advice(Results("training", "cpu", "bf16", (*rivals, amp))).startswith(ADVICE[theirs])
    assert cli_bench.advice(Results("training", "cpu", "bf16", rivals)) == ""
