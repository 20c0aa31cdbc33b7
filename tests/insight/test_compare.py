"""Two recorded runs: the first op that differs beyond rounding is found, and another order of sums is no difference."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import AuditError
from ampcompile.insight.compare import Row
from ampcompile.insight.recording import Recording
from ampcompile.records.graphs import Numbers, OpRecord
from tests.insight.made_up import op
from tests.insight.models import mean_square
from tests.models import Block, Net
from tests.weights.bindings import copies_of

LOWER, HERE = "aot_eager", r"test_compare\.py:\d+"


def net(change: Callable[[Tensor], Tensor] = lambda h: h, eps: float = 1e-5) -> nn.Module:
    """Blocks with one op to change between two runs."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.head(m.second(change(m.first(x)))), first=Block(16), second=Block(16), head=nn.Linear(16, 4)
    )
    model.second.norm.eps = eps
    return model


def record(model: Callable[..., Any], x: Tensor, **options: Any) -> Recording:
    return ampcompile.record(model, loss=mean_square, **{"lower": LOWER} | options)(x)


def half(h: Tensor) -> Tensor:
    return h.half().float()


def with_another_weight() -> nn.Module:
    model = net()
    model.second.up.weight.data[0, 0] += 1
    return model


IN_FLOAT32 = {"policy": "module *=fp32"}


@pytest.mark.ci
def test_the_first_difference_is_found_in_files_too(tmp_path: Path) -> None:
    x = torch.randn(32, 16)
    run, rounded, other_eps = record(net(), x), record(net(half), x, **IN_FLOAT32), record(net(eps=1e-4), x)
    equal = ampcompile.compare(run, record(net(), x))
    assert equal.agree and not any(row.run for row in equal.rows) and len(equal.rows) > 30
    assert str(equal).startswith("no op differs beyond rounding\n")
    assert ampcompile.compare(run, record(net(), x, eager=True)).first is None
    other_type = ampcompile.compare(run, record(net(), x, policy="module second.down=fp32"))
    assert "\noption policy default module second.down=fp32\n" in str(other_type)
    for comparison, said in (
        (other_type, r"\S+ in second\.down, models\.py:\d+[,:] "),
        (ampcompile.compare(run, other_eps), "aten.native_layer_norm in second.norm, .* in float64: "),
        (ampcompile.compare(run, record(with_another_weight(), x)), "input second.up.weight"),
        (
            ampcompile.compare(rounded, record(net(), x, **IN_FLOAT32)),
            rf"aten._to_copy in no module, {HERE}, in a alone: ",
        ),
    ):
        assert re.match(f"first difference: {said}", comparison.headlines[0]), comparison.headlines
    run.save(tmp_path / "a.json")
    other_eps.save(str(tmp_path / "b.json"))
    comparison = ampcompile.compare(tmp_path / "a.json", str(tmp_path / "b.json"))
    assert comparison == ampcompile.compare(run, other_eps)
    plain = json.loads(json.dumps(comparison.as_dict()))
    row = plain["first"]
    assert row in plain["rows"] and not plain["agree"]
    assert (row["a"]["module"], row["a"]["dtype"]) == ("second.norm", "f32") and "apart in float64: " in row["why"]


def test_another_order_of_sums_is_no_difference() -> None:
    model, x = nn.Sequential(nn.Linear(2048, 64), nn.LayerNorm(64), nn.Linear(64, 8)), torch.randn(64, 2048)
    other = copy.deepcopy(model)
    other[0].weight.data = model[0].weight.data.t().contiguous().t()
    runs = [
        ampcompile.record(f, lower=LOWER, **IN_FLOAT32)(v) for f, v in ((model, x), (other, x.t().contiguous().t()))
    ]
    assert ampcompile.compare(*runs).agree
    assert any(a.numbers != b.numbers for a, b in zip(runs[0].steps, runs[1].steps, strict=True))


def test_a_sum_in_parts_is_no_difference() -> None:
    def whole(x: Tensor) -> Tensor:
        return (x * x).sum(-1).sqrt()

    def in_parts(x: Tensor) -> Tensor:
        return torch.stack([part.sum(-1) for part in (x * x).chunk(16, -1)]).sum(0).sqrt()

    x = torch.randn(8, 4096)
    comparison = ampcompile.compare(*(record(f, x, backward=False) for f in (whole, in_parts)))
    assert comparison.agree and [row.run for row in comparison.rows].count("b") == 17


def test_a_stale_copy_is_told_from_what_ops_compute() -> None:
    model, x = nn.Linear(64, 64), torch.randn(16, 64)
    compiled = torch.compile(model, backend="amp", options={"lower": LOWER})
    with torch.no_grad():
        compiled(x)
        [copied] = copies_of(model.weight)
        copied.neg_()  # as if the weight had been negated since, unseen
        stale = ampcompile.record(compiled, backward=False)(x)
        fresh = ampcompile.record(model, lower=LOWER, backward=False)(x)
    comparison = ampcompile.compare(fresh, stale)
    assert comparison.first is None and list(comparison.results) == ["output 0 in b"] and not comparison.agree
    assert "ops agree and results don't: look at the lowering, or at copies of weights" in str(comparison)


def test_runs_without_a_common_op_are_refused() -> None:
    runs = [ampcompile.record(f, lower=LOWER, backward=False)(torch.ones(3)) for f in (torch.sin, torch.cos)]
    with pytest.raises(AuditError, match="found no op that both runs have"):
        ampcompile.compare(*runs)


MADE = op("aten.mul", shape=(4,), fingerprint=(1.0, 1.0), numbers=Numbers(1e-7, 1e-7), length=1.0)


def compared_rows(a: list[OpRecord], b: list[OpRecord]) -> list[Row]:
    return list(ampcompile.compare(Recording({}, a, {}), Recording({}, b, {})).rows)


def test_what_one_run_has_alone_stands_before_the_next_pair() -> None:
    rows = compared_rows(*([replace(MADE, op=name) for name in names] for names in ("uvxy", "vwxz")))
    assert [(row.a and row.a.op, row.b and row.b.op) for row in rows] == [
        ("u", None), ("v", "v"), (None, "w"), ("x", "x"), ("y", None), (None, "z"),
    ]  # fmt: skip
    assert not any(row.why for row in rows)
    assert [not row.measures for row in rows] == [bool(row.run) for row in rows]


def test_each_limit_is_told_apart() -> None:
    numbers = lambda *errors: {"numbers": Numbers(*errors)}
    for changes, exceeds, why in (
        ({}, (False, False, False), ""),
        ({"fingerprint": (1.0, 1.001)}, (True, False, False), "apart in float64: 1.4e-03"),
        (numbers(1e-3, 1e-7), (False, True, False), "own errors: 1.0e-07, 1.0e-03"),
        (numbers(1e-7, 1e-3), (False, False, True), "errors so far: 1.0e-07, 1.0e-03"),
        ({"dtype": torch.bfloat16}, (False, False, False), "f32 in a, bf16 in b"),
        (numbers(float("nan"), 1e-7), (False, False, False), ""),
        (numbers(None, 1e-7), (False, False, False), ""),
    ):
        [row] = compared_rows([MADE], [replace(MADE, **changes)])
        assert (
            tuple(measure.is_over for measure in row.measures) == exceeds
            and row.why.startswith(why)
            and bool(row.why) == bool(why)
        )
