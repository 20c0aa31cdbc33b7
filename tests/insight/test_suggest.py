"""`suggest` keeps few modules in float32, and what it suggests meets the tolerance."""

import math
import re
from glob import escape

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampcompile
from ampcompile.errors import AuditError
from ampcompile.insight.audit import measure_call
from tests.compiling import keep_small_values_too
from tests.insight.models import sensitive
from tests.models import Block


def test_the_module_that_matters_is_kept_and_no_other_whatever_their_names_are() -> None:
    model, x = nn.Sequential(), torch.randn(16, 8)
    model.add_module(name := 'h[0] a, b="c"*', sensitive())
    model.add_module(other := 'h0 a, b="c"', nn.Linear(8, 8))
    audit = ampcompile.audit(model, backward=False)(x)
    assert audit.error > 0.05
    told: list[str] = []
    policy = audit.suggest(0.02, progress=told.append)
    assert {path.removeprefix(escape(name)) for path, _ in policy.modules} <= {".1", ".1.0", ".1.0.wide", ".0"}
    assert policy.modules and policy.of_module(other) == "default"
    assert ampcompile.audit(model, backward=False, policy=str(policy))(x).error <= 0.02
    assert told and re.match(r"\d+ modules? in float32: error", told[0])
    for path, _ in policy.modules:
        fewer = ampcompile.Policy(modules=tuple(pair for pair in policy.modules if pair[0] != path))
        assert ampcompile.audit(model, backward=False, policy=fewer)(x).error > 0.02


def test_no_tolerance_or_one_that_float32_misses_is_refused_and_where_it_is_met_nothing_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    audit = ampcompile.audit(nn.Linear(8, 8), policy="op linear=low", backward=False)(torch.randn(4, 8))
    assert audit.suggest(0.5) == audit.policy
    assert capsys.readouterr().err.startswith("the audited policy stays as it is: its error of 0.00")
    audit.suggest(0.5, progress=(told := list[str]()).append)
    assert told[-1].endswith("is within 0.5") and not capsys.readouterr().err
    with pytest.raises(AuditError, match="with everything in float32; expected at most 1e-12"):
        audit.suggest(1e-12)
    for arguments in ((0,), (-1e-3,), (math.nan,), (math.inf,), ("1e-3",), (1e-3, 0)):
        with pytest.raises(AuditError, match="expected a relative error above 0"):
            audit.suggest(*arguments)


def test_ops_outside_of_modules_are_kept_by_keeping_everything() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    audit = ampcompile.audit(lambda a, b: a @ b)(a, b)
    assert audit.suggest(1e-5) == ampcompile.Policy(modules=(("*", "fp32"),))


def test_what_is_found_when_trials_run_out_meets_the_tolerance() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(16, 8)
    audit = ampcompile.audit(model, backward=False)(x)
    told: list[str] = []
    policy = audit.suggest(audit.error / 2, trials=5, progress=told.append)
    assert len(told) <= 5
    assert ampcompile.audit(model, backward=False, policy=policy)(x).error <= audit.error / 2


def test_dropout_draws_the_same_under_every_policy() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(64, 8)
    audit = ampcompile.audit(model)(x)
    torch.rand(3)
    assert audit.call is not None
    assert measure_call(audit.call).outputs == audit.outputs


def test_results_that_are_views_are_compared_themselves() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 4, 8)
    audit = ampcompile.audit(model, policy="module 1=fp32")(x)
    assert len(audit.outputs) == 1, "a product in float32, viewed as three dimensions"


@pytest.mark.ci
def test_values_are_kept_in_8_bits_where_the_tolerance_admits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(*(Block(16, activation=F.gelu) for _ in range(3))), torch.randn(4, 8, 16)
    audit = ampcompile.audit(model, products="torch")(x)
    with pytest.raises(AuditError, match="found no value that may be kept in 8 bits"):
        audit.suggest(0.1, allow="saved")
    keep_small_values_too(monkeypatch)
    assert audit.suggest(0.1, allow="saved") == {"*": "fp8"}
    everything = ampcompile.audit(model, products="torch", saved="fp8")(x)
    tolerance = (audit.error * everything.error) ** 0.5
    saved = audit.suggest(tolerance, allow="saved")
    some = ampcompile.audit(model, products="torch", saved=saved)(x)
    low, most = ([r for r in a.saved if r.kept_as == torch.float8_e4m3fn] for a in (some, everything))
    assert some.error <= tolerance < everything.error and 0 < len(low) < len(most)
    with pytest.raises(AuditError, match="with nothing kept in 8 bits; expected at most"):
        everything.suggest(audit.error / 2, allow="saved")
