"""A report as text: equal rows are merged, reasons are footnotes, sizes are short."""

from dataclasses import replace

import torch

from ampcompile.explaining.eager_modules import EagerRecord
from ampcompile.explaining.report import Report
from ampcompile.explaining.table import render
from ampcompile.records.casts import FusionRecord, OpRecord
from ampcompile.records.totals import EAGER_BACKWARD, EAGER_FORWARD, JointCast, Total
from ampcompile.sharding.weight import GatherRecord
from tests.explaining.made_up import cast, graph

HOISTED = ("inserted", "hoisted")


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_repeated_layers_are_one_row_with_its_count_bytes_and_footnote() -> None:
    casts = {
        0: cast(module="blocks.0.up"),
        1: cast(module="blocks.11.up"),
        2: cast(module="blocks.11.up", fate=(*HOISTED, "shared")),
        3: cast(module="layer2.up", because="the policy", shape=(), of="input"),
    }
    text = render(Report([graph("cpu in bf16", casts=casts)()]), width=150)
    weight = ["model.py:7", "weight", "f32>bf16", "2x3"]
    assert ["aten.linear", "blocks.*.up", *weight, "every", "call", "2", "72", "B", "1"] in rows(text)
    assert ["aten.linear", "blocks.11.up", *weight, "shared", "1", "36", "B", "1"] in rows(text)
    single = ["model.py:7", "input", "f32>bf16", "scalar", "every", "call", "1", "36", "B", "2"]
    assert ["aten.linear", "layer2.up", *single] in rows(text)
    assert "[1] the list" in text.splitlines() and "[2] the policy" in text.splitlines()
    assert "graph 0 of 1: cpu in bf16, 0 ops, 4 casts" in text.splitlines()


def test_ops_are_counted_and_sorted_and_without_a_reason_have_no_footnote() -> None:
    ops = [
        OpRecord("aten.tanh", "m", "model.py:1", torch.bfloat16, "", True),
        OpRecord("aten.mm", "m", "model.py:1", torch.bfloat16, "the list", True),
        OpRecord("aten.mm", "n", "model.py:2", torch.bfloat16, "the list", True),
        OpRecord("my.op", "n", "model.py:2", None, "", False),
    ]
    text = render(Report([graph("cpu in bf16", ops=tuple(ops))()]), width=100)
    table = rows(text)
    start = table.index(["op", "dtype", "times", "why"])
    assert table[start + 1 : start + 4] == [["aten.mm", "bf16", "2", "1"], ["aten.tanh", "bf16", "1"], ["my.op", "1"]]
    assert "unknown to the policy: my.op (ampcompile.register_op gives a rule)" in text


def test_breaks_and_fusions_are_told() -> None:
    loss = FusionRecord("linear_cross_entropy", "aten.x", "m", "model.py:1", 1024, 512)
    first = graph("cpu in bf16")(reason="a call that Dynamo can't trace", fusions=(loss, loss))
    second = graph("cpu in bf16")(fusions=(loss,))
    gathers = [GatherRecord("a.weight", "bf16", "graphs round it", 2048)]
    eager = [EagerRecord("rnn", "LSTM", "/x/rnn.py:7", 0.25)]
    report = Report([first, second], eager=eager, breaks=["no way"], gathers=gathers)
    lines = render(report, width=100).splitlines()
    assert "graph break before a graph: no way" in lines
    assert any(line.split() == ["rnn", "LSTM", "rnn.py:7", "25%"] for line in lines)
    assert any(line.split()[:2] == ["a.weight", "bf16"] and line.split()[-2:] == ["2.0", "KiB"] for line in lines)
    assert "graph break after graph 0: a call that Dynamo can't trace" in lines
    assert "fused: 3 linear_cross_entropy; by count 3.0 KiB less moved in one call, 1.5 KiB less held" in lines
    assert not any(line.startswith("unknown") for line in lines)


def test_what_was_gained_comes_first() -> None:
    stages = (EAGER_FORWARD, 63, 1024), (EAGER_BACKWARD, 75, 1024), ("insert_casts", 5, 100)
    hoisted = {0: cast(fate=HOISTED), 1: cast()}
    gradient = JointCast("aten.mm", "bf16>f32", (2,), 12, "", "", True)
    joint = (gradient, replace(gradient, backward=False))
    trained = graph("cpu in bf16", casts=hoisted)(
        totals=tuple(Total(*stage) for stage in stages), joint_casts=joint, joint_code="def joint", products=(2, 3)
    )
    text = render(Report([trained]), width=200).splitlines()
    assert text[0] == (
        "amp removes 133 of eager autocast's 138 casts a step, 2.0 KiB become 76 B; 1 of weights run once per update "
        "instead, 36 B"
    )
    ours = [line.removeprefix("amp, ").split() for line in text if line.startswith("amp, ")]
    assert ours == [
        ["every", "call", "1", "36", "B"],
        ["once", "per", "update", "1", "36", "B"],
        ["backward", "1", "12", "B"],
        ["written", "in", "your", "code", "3", "28", "B"],
    ]
    assert "2 of 3 matrix products and convolutions, backward included, run in f32" in "\n".join(text)
    served = graph("cpu in bf16", casts={0: cast()})(totals=(Total(EAGER_FORWARD, 1, 9), Total("insert_casts", 1, 36)))
    assert render(Report([served]), width=200).startswith("amp casts 1 times a call, 36 B, where eager autocast does 1")


def test_a_report_without_numbers_says_why() -> None:
    silent, told = (render(Report([], breaks=breaks), width=200) for breaks in ([], ["a loop"]))
    nothing = "Dynamo made no graph: nothing is compiled"
    assert silent.startswith(f"{nothing}. torch._dynamo.reset() before") and told.startswith(f"{nothing}\n")
    assert render(Report([graph("cpu")(left=True)]), width=100).startswith("every graph is left to autocast")


def test_a_layer_keeps_its_name_where_no_rows_are_merged() -> None:
    text = render(Report([graph("cpu in bf16", casts={0: cast(module="0"), 1: cast(module="2", shape=(4,))})()]), 150)
    assert [row[1] for row in rows(text) if row[:1] == ["aten.linear"]] == ["0", "2"]
