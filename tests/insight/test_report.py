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


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a row is one line


def rows(report: Report) -> list[list[str]]:
    return [line.split() for line in str(report).splitlines()]


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


def test_repeated_layers_are_one_row_with_its_count_bytes_and_footnote() -> None:
    casts = (
        cast(module="blocks.0.up"),
        cast(module="blocks.11.up"),
        cast(module="blocks.11.up", fate=(*HOISTED, "shared")),
        cast(module="layer2.up", because="the policy", shape=(), of="input"),
    )
    report = Report([graph(casts=casts)])
    weight = ["model.py:7", "weight", "f32>bf16", "2x3"]
    assert ["aten.linear", "blocks.*.up", *weight, "every", "call", "2", "72", "B", "1"] in rows(report)
    assert ["aten.linear", "blocks.11.up", *weight, "shared", "1", "36", "B", "1"] in rows(report)
    single = ["model.py:7", "input", "f32>bf16", "scalar", "every", "call", "1", "36", "B", "2"]
    assert ["aten.linear", "layer2.up", *single] in rows(report)
    lines = str(report).splitlines()
    assert {"[1] the list", "[2] the policy", "graph 0 of 1: cpu in bf16, 0 ops, 4 casts"} <= set(lines)
    apart = Report([graph(casts=(cast(module="0"), cast(module="2", shape=(4,))))])
    assert [row[1] for row in rows(apart) if row[:1] == ["aten.linear"]] == ["0", "2"], "where no rows are merged"


def test_breaks_and_gathers_are_told() -> None:
    first = graph(reason="a call that Dynamo can't trace")
    report = Report([first, graph()], breaks=["no way"], gathers=[GATHER])
    lines = str(report).splitlines()
    assert "graph break before a graph: no way" in lines
    assert any(row[:2] == ["a.weight", "bf16"] and row[-2:] == ["2.0", "KiB"] for row in rows(report))
    assert "graph break after graph 0: a call that Dynamo can't trace" in lines
    assert not any(line.startswith("unknown") for line in lines)


def test_what_was_gained_comes_first() -> None:
    stages = Total("insert_casts", 63, 1024), Total(BACKWARD, 75, 1024)
    gradient = cast("", of="aten.mm", bytes=12, backward=True, fate=())
    trained = graph(
        casts=(cast(fate=HOISTED), cast()),
        totals=stages,
        backward_casts=(gradient,),
        joint_code="def joint",
        products=(2, 3),
    )
    text = str(Report([trained])).splitlines()
    assert text[0] == (
        "amp removes 75 of eager autocast's 138 casts a step, 2.0 KiB become 1000 B; 1 of weights run once per update "
        "instead, 36 B"
    )
    ours = [line.removeprefix("amp, ").split() for line in text if line.startswith("amp, ")]
    assert ours == [
        ["every", "call", "1", "36", "B"],
        ["once", "per", "update", "1", "36", "B"],
        ["backward", "1", "12", "B"],
        ["written", "in", "your", "code", "61", "952", "B"],
    ]
    assert "2 of 3 matrix products and convolutions, backward included, run in f32" in "\n".join(text)
    served = graph(casts=(cast(),), totals=(Total("insert_casts", 1, 36),))
    assert str(Report([served])).startswith("amp casts 1 times a call, 36 B, where eager autocast does 1")
    silent, told = (str(Report([], breaks=breaks)) for breaks in ([], ["a loop"]))
    nothing = "Dynamo made no graph: nothing is compiled"
    assert silent.startswith(f"{nothing}. torch._dynamo.reset() before") and told.startswith(f"{nothing}\n")
    assert str(Report([replace(graph(), left=True)])).startswith("every graph is left to autocast")
