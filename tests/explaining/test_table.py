"""A report as text: equal rows are merged, reasons are footnotes, sizes are short."""

import torch

from ampcompile.explaining.table import render
from ampcompile.records.casts import FusionRecord, OpRecord
from ampcompile.records.totals import Total
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
    text = render([graph("cpu in bf16", casts=casts)()], [], [], width=150)
    start = ["aten.linear", "blocks.*.up", "model.py:7"]
    assert [*start, "weight", "f32>bf16", "2x3", "inserted", "2", "72", "B", "1"] in rows(text)
    assert [*start, "weight", "f32>bf16", "2x3", "hoisted+shared", "1", "36", "B", "1"] in rows(text)
    assert [
        "aten.linear",
        "layer2.up",
        "model.py:7",
        "input",
        "f32>bf16",
        "scalar",
        "inserted",
        "1",
        "36",
        "B",
        "2",
    ] in (rows(text))
    assert "[1] the list" in text.splitlines() and "[2] the policy" in text.splitlines()
    assert "graph 0 of 1: cpu in bf16, 0 ops, 4 casts" in text.splitlines()
    assert "4 casts inserted, 144 B; 3 of them run as casts in every call, 108 B" in text.splitlines()


def test_ops_are_counted_and_sorted_and_without_a_reason_have_no_footnote() -> None:
    ops = [
        OpRecord("aten.tanh", "m", "model.py:1", torch.bfloat16, "", True),
        OpRecord("aten.mm", "m", "model.py:1", torch.bfloat16, "the list", True),
        OpRecord("aten.mm", "n", "model.py:2", torch.bfloat16, "the list", True),
        OpRecord("my.op", "n", "model.py:2", None, "", False),
    ]
    text = render([graph("cpu in bf16", ops=tuple(ops))()], ["my.op"], [], width=100)
    table = rows(text)
    start = table.index(["op", "dtype", "times", "why"])
    assert table[start + 1 : start + 4] == [["aten.mm", "bf16", "2", "1"], ["aten.tanh", "bf16", "1"], ["my.op", "1"]]
    assert "unknown to the policy: my.op (ampcompile.register_op gives a rule)" in text


def test_breaks_totals_and_fusions_are_told() -> None:
    families = ("linear", "linear_cross_entropy")
    layer, loss = (FusionRecord(family, "aten.x", "m", "model.py:1", 1024, 512) for family in families)
    first = graph("cpu in bf16")(reason="a call that Dynamo can't trace\nand more", fusions=(layer, layer))
    second = graph("cpu in bf16")(fusions=(loss,))
    lines = render([first, second], [], [Total("insert_casts", 5, 2048)], width=100).splitlines()
    assert "graph break after graph 0: a call that Dynamo can't trace" in lines
    assert (
        "fused: 2 linear, 1 linear_cross_entropy; by count 3.0 KiB less moved in one call, 1.5 KiB less held" in lines
    )
    assert any(line.split() == ["insert_casts", "5", "2.0", "KiB"] for line in lines)
    assert not any(line.startswith("unknown") for line in lines)
