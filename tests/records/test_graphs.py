"""Records of casts and values: where from, how large, whether a cast still runs, what an op computes in, its reads."""

from typing import Any

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.records.graphs import CastRecord, GraphRecord
from tests.models import Net, weight

LOW, HALF, HIGH, WIDE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def reads(m: Any, x: Tensor) -> Tensor:
    """Products with a view of a weight, a constant, an input's part and an activation."""
    y = x[:2].t() @ x[:2]
    y = y @ m.weight.t()
    return y @ torch.eye(4).cumsum(0)


def casts(f: Any, *args: Tensor, **options: Any) -> list[CastRecord]:
    return list(ampcompile.explain(f, outputs="autocast", **options)(*args).casts)


def test_what_is_cast_is_followed_through_views_to_where_it_comes_from() -> None:
    found = casts(Net(reads, weight=weight(4, 4)), torch.randn(3, 4), policy="op cumsum=fp32")
    assert {(cast.of, cast.shape, cast.bytes) for cast in found if cast.dtype_to == LOW} == {
        ("input", (4, 2), 8 * 6),
        ("input", (2, 4), 8 * 6),
        ("weight", (4, 4), 16 * 6),
        ("activation", (4, 4), 16 * 6),
    }
    assert {cast.op for cast in found} == {"aten.matmul"}


def test_biases_are_told_from_weights() -> None:
    class Layers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x).flatten(1), self[2].weight)

    found = casts(Layers(nn.Conv1d(3, 2, 1), nn.GRUCell(8, 5), nn.Embedding(4, 5)), torch.randn(4, 3, 4))
    assert [(cast.of, cast.shape) for cast in found if cast.of in ("weight", "bias")] == [
        *(("weight", (2, 3, 1)), ("bias", (2,))),
        *(("weight", (15, 8)), ("bias", (15,)), ("weight", (4, 5)), ("weight", (15, 5)), ("bias", (15,))),
    ]


def test_a_graph_holds_ops_with_what_they_read_through_casts_and_what_is_returned() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y).relu()

    graph = record(f, torch.randn(2, 3), torch.randn(3, 4), outputs="autocast")
    product, relu, output = graph.values
    assert graph.ops == [product, relu] and (output.op, output.reads, output.shape) == ("output", (relu.name,), ())
    assert (product.op, product.dtype, product.shape) == ("aten.mm", LOW, (2, 4))
    assert product.because and product.source.startswith(__file__)
    assert product.reads == tuple(cast.name for cast in graph.casts)
    assert [(cast.op, cast.dtypes, cast.shape) for cast in graph.casts] == [
        ("aten.mm", "f32>bf16", (2, 3)),
        ("aten.mm", "f32>bf16", (3, 4)),
    ]
    assert all(cast.because == product.because and len(cast.reads) == 1 for cast in graph.casts)


def test_a_bodys_values_are_named_after_it_and_stand_after_its_caller() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: (x - 1).t() @ x, (x,))

    found = record(f, torch.randn(2, 2), outputs="autocast").values
    assert len({value.name for value in found}) == len(found)
    inner = [value for value in found if "/" in value.name]
    assert [op.op for op in inner if op.op != "output"] == ["aten.matmul", "aten.sub", "aten.t", "aten.matmul"]
    first, second = dict.fromkeys(value.name.rpartition("/")[0] for value in inner)
    assert all(name.startswith((f"{first}/", f"{second}/")) for value in inner for name in value.reads)
    assert found.index(inner[0]) == len(found) - len(inner)


def record(f, *args: Tensor, **options) -> GraphRecord:
    [graph] = ampcompile.explain(f, **options)(*args).graphs
    return graph


def double(x: Tensor) -> Tensor:
    return x @ x


def test_a_graph_says_under_which_autocast_it_was_traced() -> None:
    x = torch.randn(2, 2)
    assert record(double, x).precision == "cpu in bf16"
    assert record(double, x, dtype=torch.float16).precision == "cpu in f16"
    with torch.autocast("cpu", torch.float16):
        assert record(double, x).precision == "cpu in f16"
    with torch.autocast("cpu", enabled=False):
        assert record(double, x).precision == "cpu without autocast"
    assert record(double, x.to("meta")).precision == "meta without autocast"
