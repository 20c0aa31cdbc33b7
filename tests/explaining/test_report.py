"""A report of several graphs: what each tells is put together in order, and sums are sums of all."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from ampcompile.explaining.report import Report
from ampcompile.records.casts import FusionRecord, OpRecord
from ampcompile.records.totals import Total
from ampcompile.sharding.weight import GatherRecord
from tests.explaining.made_up import cast, graph


def op(name: str, known: bool = True) -> OpRecord:
    return OpRecord(name, "m", "model.py:1", torch.float32, "", known)


REPORT = Report(
    [
        graph("cpu in bf16", ops=(op("b.b", False), op("a.a", False)), casts={3: cast(), 1: cast(op="aten.mm")})(
            code="def one", joint_code="def joint", totals=(Total("first", 1, 10), Total("last", 2, 5))
        ),
        graph("cpu in f16", ops=(op("a.a", False), op("c.c")), casts={2: cast(op="aten.exp")})(
            code="def two",
            totals=(Total("first", 3, 20), Total("only here", 1, 1)),
            fusions=(FusionRecord("linear_cross_entropy", "aten.linear", "m", "model.py:1", 8, 4),),
        ),
    ]
)


def test_each_text_stands_under_its_graph() -> None:
    assert REPORT.code == "# graph 0: cpu in bf16\ndef one\n\n# graph 1: cpu in f16\ndef two"
    assert REPORT.joint_code == "# graph 0: cpu in bf16\ndef joint"


def test_casts_ops_and_fusions_are_those_of_all_graphs_in_order() -> None:
    assert [record.op for record in REPORT.casts] == ["aten.linear", "aten.mm", "aten.exp"]
    assert [record.op for record in REPORT.ops] == ["b.b", "a.a", "a.a", "c.c"]
    assert [record.family for record in REPORT.fusions] == ["linear_cross_entropy"]
    assert REPORT.unknown_ops == ["a.a", "b.b"], "each once"


def test_totals_of_a_stage_are_summed() -> None:
    assert REPORT.totals == [Total("first", 4, 30), Total("last", 2, 5), Total("only here", 1, 1)]


def test_it_is_saved_as_a_page_and_printed_as_a_table(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "amp.html")
    assert "<html" in (tmp_path / "amp.html").read_text(encoding="utf-8")
    assert "unknown to the policy: a.a, b.b" in str(REPORT)


def test_it_is_short_in_a_debugger_and_plain_data_for_other_programs() -> None:
    assert repr(REPORT) == "<ampcompile report: 2 graphs, 4 ops, 3 casts>"
    gathers = [GatherRecord("a.weight", "bf16", "compiled graphs round it", 2048)]
    data = json.loads(json.dumps(replace(REPORT, gathers=gathers).as_dict()))
    assert data["gathers"] == [gathers[0]._asdict()]
    assert [[op["op"] for op in each["ops"]] for each in data["graphs"]] == [["b.b", "a.a"], ["a.a", "c.c"]]
    assert data["graphs"][0]["casts"][0]["dtype_to"] == "bf16" and data["graphs"][1]["fusions"][0]["saved"] == 8
    assert data["totals"][0] == {"stage": "first", "casts": 4, "bytes": 30} and data["unknown_ops"] == ["a.a", "b.b"]


def test_a_notebook_shows_the_page() -> None:
    html = REPORT._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!doctype html') and html.count('"') == 4
