"""A report of several graphs as text and as data: sums are of all, equal rows are merged, reasons are footnotes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ampcompile.insight.report import Report
from ampcompile.records.graphs import BACKWARD, Total
from ampcompile.sharding.weight import GatherRecord
from tests.insight.made_up import cast, graph, op

HOISTED = ("inserted", "hoisted")
GATHER = GatherRecord("a.weight", "bf16", "graphs round it", 2048)
REPORT = Report(
    [
        graph(
            values=(op("b.b", known=False), op("a.a", known=False), op("output")),
            casts=(cast(), cast(op="aten.mm")),
            code="def one",
            joint_code="def joint",
            totals=(Total("first", 1, 10), Total("last", 2, 5)),
        ),
        graph(
            "cpu in f16",
            values=(op("a.a", known=False), op("c.c")),
            casts=(cast(op="aten.exp"),),
            code="def two",
            totals=(Total("first", 3, 20), Total("only here", 1, 1)),
        ),
    ],
    gathers=[GATHER],
)


def test_what_graphs_tell_is_put_together_in_order_and_summed() -> None:
    assert REPORT.code == "# graph 0: cpu in bf16\ndef one\n\n# graph 1: cpu in f16\ndef two"
    assert REPORT.joint_code == "# graph 0: cpu in bf16\ndef joint"
    assert [record.op for record in REPORT.casts] == ["aten.linear", "aten.mm", "aten.exp"]
    assert [record.op for record in REPORT.ops] == ["b.b", "a.a", "a.a", "c.c"]
    assert REPORT.unknown_ops == ["a.a", "b.b"], "each once"
    assert REPORT.totals == [Total("first", 4, 30), Total("last", 2, 5), Total("only here", 1, 1)]


def test_it_is_a_page_short_in_a_debugger_and_plain_data_for_other_programs(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "amp.html")
    assert "<html" in (tmp_path / "amp.html").read_text(encoding="utf-8")
    html = REPORT._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!doctype html') and html.count('"') == 4
    assert repr(REPORT) == "<ampcompile report: 2 graphs, 4 ops, 3 casts>"
    data = json.loads(json.dumps(REPORT.as_dict()))
    assert data["gathers"] == [GATHER._asdict()]
    assert [[op["op"] for op in each["values"]] for each in data["graphs"]] == [
        ["b.b", "a.a", "output"],
        ["a.a", "c.c"],
    ]
    assert data["graphs"][0]["casts"][0]["dtype_to"] == "bf16"
    assert data["totals"][0] == {"stage": "first", "casts": 4, "bytes": 30} and data["unknown_ops"] == ["a.a", "b.b"]


TRAINED = graph(
    casts=(
        cast(fate=HOISTED),
        cast(module="blocks.0.up"),
        cast(module="blocks.11.up"),
        cast(module="blocks.11.up", fate=(*HOISTED, "shared")),
        cast(module="layer2.up", because="the policy", shape=(), of="input"),
        cast(module="0"),
        cast(module="2", shape=(4,)),
    ),
    totals=(Total("insert_casts", 63, 1024), Total(BACKWARD, 75, 1024)),
    backward_casts=(cast("", of="aten.mm", bytes=12, backward=True, fate=()),),
    joint_code="def joint",
    products=(2, 3),
    reason="a call that Dynamo can't trace",
)
TEXT = """\
amp removes 76 of eager autocast's 138 casts a step, 2.0 KiB become 964 B; 1 of weights run once per update instead (a
fused step casts none), 36 B

casts                     times   bytes
eager autocast, forward      63 1.0 KiB
eager autocast, backward     75 1.0 KiB
amp, every call               5   180 B
amp, once per update          1    36 B
amp, backward                 1    12 B
amp, written in your code    56   772 B

graph 0 of 2: cpu in bf16, 0 ops, 7 casts
cast for    module       line       of      dtypes   shape  runs            times bytes why
aten.linear blocks.0.up  model.py:7 weight  f32>bf16 2x3    once per update     1  36 B   1
aten.linear blocks.*.up  model.py:7 weight  f32>bf16 2x3    every call          2  72 B   1
aten.linear blocks.11.up model.py:7 weight  f32>bf16 2x3    shared              1  36 B   1
aten.linear layer2.up    model.py:7 input   f32>bf16 scalar every call          1  36 B   2
aten.linear 0            model.py:7 weight  f32>bf16 2x3    every call          1  36 B   1
aten.linear 2            model.py:7 weight  f32>bf16 4      every call          1  36 B   1
            blocks.0.up  model.py:7 aten.mm f32>bf16 2x3    backward            1  12 B   1
op dtype times why
2 of 3 matrix products and convolutions, backward included, run in f32 on rounded operands: this CPU is faster so
graph break after graph 0: a call that Dynamo can't trace

graph 1 of 2: cpu in bf16, 0 ops, 0 casts
op dtype times why

graph break before a graph: no way
[1] the list
[2] the policy

weight   gathered as because         bytes saved
a.weight bf16        graphs round it     2.0 KiB"""


def test_what_was_gained_comes_first_and_equal_rows_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    text = str(Report([TRAINED, graph()], breaks=["no way"], gathers=[GATHER]))
    assert "\n".join(map(str.rstrip, text.splitlines())) == TEXT


def test_a_call_that_is_served_or_not_compiled_is_told_of() -> None:
    served = graph(casts=(cast(),), totals=(Total("insert_casts", 1, 36),))
    assert str(Report([served])).startswith("amp casts 1 times a call, 36 B, where eager autocast does 1")
    silent, told = (str(Report([], breaks=breaks)) for breaks in ([], ["a loop"]))
    nothing = "Dynamo made no graph: nothing is compiled"
    assert silent.startswith(f"{nothing}. torch._dynamo.reset() before") and told.startswith(f"{nothing}\n")
    assert str(Report([replace(graph(), left=True)])).startswith("every graph is left to autocast")
