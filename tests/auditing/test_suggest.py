"""`suggest` keeps few modules in float32, and what it suggests meets the tolerance."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.auditing.suggest import _prefix, _shrink, _with_parents
from ampcompile.errors import AuditError
from tests.tiny_models import build


class Cancels(nn.Module):
    """Rounds its input badly: what is left is the difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)
        nn.init.ones_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x + 100) - 800


def sensitive() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(Cancels(), nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8))


def test_the_module_that_matters_is_kept_and_no_other() -> None:
    model, x = sensitive(), torch.randn(16, 8)
    audit = ampcompile.audit(model, backward=False)(x)
    assert audit.error > 0.05
    told: list[str] = []
    policy = audit.suggest(0.02, progress=told.append)
    assert {path for path, _ in policy.modules} <= {"1", "1.0", "1.0.wide", "0"} and policy.modules
    assert ampcompile.audit(model, backward=False, policy=policy)(x).error <= 0.02
    assert told and re.match(r"\d+ modules? in float32: error", told[0])
    for path, _ in policy.modules:
        fewer = ampcompile.Policy(modules=tuple(pair for pair in policy.modules if pair[0] != path))
        assert ampcompile.audit(model, backward=False, policy=fewer)(x).error > 0.02


def test_nothing_is_kept_where_the_tolerance_is_met() -> None:
    audit = ampcompile.audit(nn.Linear(8, 8), policy="op linear=low")(torch.randn(4, 8))
    assert audit.suggest(0.5) == audit.policy


def test_a_tolerance_that_float32_misses_is_refused() -> None:
    audit = ampcompile.audit(nn.Linear(8, 8))(torch.randn(4, 8))
    with pytest.raises(AuditError, match="with everything in float32; expected at most 1e-12"):
        audit.suggest(1e-12)


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
    assert audit.with_policy is not None
    assert audit.with_policy(audit.policy, True).outputs == audit.outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "resnet"])
def test_what_is_suggested_meets_the_tolerance(name: str) -> None:
    model, inputs = build(name)

    def loss(out: Any) -> Tensor:
        return out.logits.float().square().mean()

    audit = ampcompile.audit(model, loss=loss)(**inputs)
    tolerance = audit.error / 2
    policy = audit.suggest(tolerance, trials=12)  # 9 of them are the bisection
    again = ampcompile.audit(model, loss=loss, policy=str(policy))(**inputs)
    assert again.error <= tolerance
    modules = {op.module for op in audit.ops}
    kept = {m for m in modules for path, _ in policy.modules if m == path or m.startswith(f"{path}.")}
    assert 0 < len(kept) < len(modules)
    computing = [op for op in again.ops if op.op != "aten.zeros"]  # T5 asks for zeros in the dtype it had when traced
    assert {op.dtype for op in computing if op.module in kept and not op.backward} == {torch.float32}


def meets_with(needed: set[str]) -> Any:
    return lambda paths: needed <= set(paths)


def test_bisection_finds_the_shortest_beginning() -> None:
    suspects = list("abcdefgh")
    assert _prefix(suspects, meets_with({"c"})) == ["a", "b", "c"]
    assert _prefix(suspects, meets_with({"z"})) is None


def test_what_can_be_spared_is_dropped() -> None:
    assert _shrink(list("abcdefgh"), meets_with({"c", "h"})) == ["c", "h"]
    assert _shrink(["a"], meets_with({"a"})) == ["a"]


def test_a_parent_stands_for_all_its_modules() -> None:
    modules = {"a.x", "a.y.p", "a.y.q", "b.x", "b.z"}
    assert _with_parents(["a.x", "a.y.p", "a.y.q", "b.x"], modules) == ["a", "b.x"]
    assert _with_parents(["a.y.p", "a.y.q"], modules) == ["a.y"]
    assert _with_parents(["a", "b.x"], {"a", "a.c", "b.x", "b.z"}) == ["a", "b.x"]


def test_nonsense_is_refused() -> None:
    audit = ampcompile.audit(nn.Linear(2, 2), backward=False)(torch.ones(1, 2))
    for arguments in ((0,), (-1e-3,), (math.nan,), (math.inf,), ("1e-3",), (1e-3, 0)):
        with pytest.raises(AuditError, match="expected a relative error above 0"):
            audit.suggest(*arguments)
