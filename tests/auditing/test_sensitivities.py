"""Predicted errors by module and op, and the order in which modules are given up."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.auditing.adjoints import Rounding
from ampcompile.auditing.records import Place
from ampcompile.auditing.sensitivities import Sensitivities, enclosing, give_up_one_by_one
from tests.auditing.models import Heads
from tests.auditing.predictions import sensitive


def rounding(module: str, square: float, *readers: str, op: str = "aten.mm", low: bool = True) -> Rounding:
    return Rounding(
        Place(op, module, "", False),
        low,
        10,
        frozenset({module}),
        set(readers),
        {"output 0": square, "gradients": square / 4},
    )


FOUND = Sensitivities([rounding("a", 9.0), rounding("a", 7.0, "b"), rounding("b", 4.0), rounding("b", 1.0, low=False)])


def test_rows_add_up_to_everything() -> None:
    first, second = FOUND.rows
    assert (first.module, first.op, first.error, first.result) == ("a", "aten.mm", 4.0, "output 0")
    assert first.share + second.share == pytest.approx(1) and second.error == math.sqrt(5)
    assert FOUND.error() == math.sqrt(21)
    assert json.loads(json.dumps(FOUND.as_dict()))["rows"][0]["module"] == "a"


def test_what_is_left_with_some_modules_in_float32() -> None:
    assert FOUND.error({"a"}) == math.sqrt(12), "what b reads is rounded there instead"
    assert FOUND.error({"a", "b"}) == 1.0


def test_by_module_all_kinds_of_ops_together() -> None:
    assert FOUND.by_module() == {
        "a": {"output 0": 16.0, "gradients": 4.0},
        "b": {"output 0": 5.0, "gradients": 1.25},
    }
    assert FOUND.floor == 1.0, "float32's own"


def test_errors_that_nothing_bounds_are_kept_apart() -> None:
    found = Sensitivities([rounding("a", math.inf), rounding("b", math.nan), rounding("c", 1.0)])
    assert [row.module for row in found.rows][2] == "c"
    assert math.isnan(found.error()) or math.isinf(found.error())
    assert found.error({"a", "b"}) == 1.0
    assert [sorted(kept) for kept in give_up_one_by_one(found.roundings, {"a", "b", "c"})][1] == ["a", "b"]


def test_modules_are_given_up_by_what_they_add_and_cost() -> None:
    sets = [sorted(kept) for kept in give_up_one_by_one(FOUND.roundings, {"a", "b"})]
    assert sets == [["a", "b"], ["a"], []]
    large = [rounding("a", 1.1), rounding("b", 1.0)]
    large[0].elements = 1000
    assert [sorted(kept) for kept in give_up_one_by_one(large, {"a", "b"})][1] == ["b"], "twice the cost, 1.1 the error"


def test_a_module_is_kept_only_while_all_inside_it_are() -> None:
    roundings = [rounding("a", 5.0), rounding("a.x", 1.0), rounding("a.y", 3.0), rounding("", 0.5)]
    sets = [sorted(kept) for kept in give_up_one_by_one(roundings, {"", "a", "a.x", "a.y"})]
    assert sets == [["", "a", "a.x", "a.y"], ["a", "a.x", "a.y"], ["a.x", "a.y"], ["a.y"], []]
    assert enclosing("a.b.c") == ["", "a", "a.b"] and enclosing("") == []


def test_the_table_names_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    audit = ampcompile.audit(sensitive(), backward=False)(torch.randn(16, 8))
    found = audit.sensitivities()
    assert found.rows[0].module == "1.0.wide" and found.rows[0].share > 0.5
    lines = str(found).splitlines()
    assert lines[0].split() == ["module", "op", "of", "error", "share"] and lines[1].startswith("1.0.wide aten.addmm")
    assert max(map(len, lines)) <= 80


def test_the_page_of_explain_holds_them_by_the_same_modules(tmp_path: Path) -> None:
    model, x = sensitive(), torch.randn(16, 8)
    found = ampcompile.audit(model, backward=False)(x).sensitivities()
    report = ampcompile.explain(model)(x)
    report.save(tmp_path / "amp.html", found)
    assert f'"floor":{found.floor!r},' in (tmp_path / "amp.html").read_text(encoding="utf-8")
    assert found.by_module().keys() <= {op.module for op in report.ops} | {""}


def test_an_op_is_kept_in_two_modules_and_nothing_else() -> None:
    model, x = Heads(), torch.randn(16, 8)
    audit = ampcompile.audit(model, backward=False)(x)
    rows = audit.sensitivities().rows
    assert {(row.module, row.op, row.keep) for row in rows[:2]} == {
        ("first", "aten._softmax", "op softmax@first=fp32"),
        ("second", "aten._softmax", "op softmax@second=fp32"),
    }
    assert {row.keep for row in rows if row.op == "aten._to_copy"} == {""}
    products = {row.keep for row in rows if row.op == "aten.mm"}  # of layers without a bias
    assert products == {"op linear@first.logits=fp32", "op linear@second.logits=fp32"}

    policy = ", ".join(row.keep for row in rows[:2])
    kept = ampcompile.audit(model, policy=policy, backward=False)(x)
    assert audit.error > 0.05 and kept.error < 0.02
    rounded = {(op.module, op.op) for op in kept.ops if op.dtype == torch.bfloat16}
    assert {("first.logits", "aten.mm"), ("second.logits", "aten.mm"), ("plain", "aten._softmax")} <= rounded
    assert not {("first", "aten._softmax"), ("second", "aten._softmax")} & rounded


def test_long_tables_say_what_they_leave_out() -> None:
    found = Sensitivities([rounding(str(i), 1.0) for i in range(40)], ["mylib.op"])
    assert str(found).splitlines()[-2:] == ["10 more rows", "without a derivative: mylib.op"]


def test_without_low_precision_nothing_is_predicted() -> None:
    audit = ampcompile.audit(nn.Linear(4, 4), policy="module *=fp32", backward=False)(torch.randn(2, 4))
    assert audit.sensitivities().error() == pytest.approx(audit.error, rel=1) and audit.error < 1e-6


def test_no_rounding_of_16_bits_is_left_with_everything_in_float32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    audit = ampcompile.audit(model)(torch.randn(16, 8))
    assert "aten.native_layer_norm_backward" in {op.op for op in audit.ops if op.dtype == torch.bfloat16}
    assert audit.error > 1e-3 and audit.sensitivities().error({op.module for op in audit.ops}) < 1e-6
