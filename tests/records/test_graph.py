"""Every value of a graph is a record that says what it reads, bodies of higher-order ops after their caller."""

import torch
from torch import Tensor

import ampcompile
from ampcompile.records.graph import NodeRecord


def records(f, *args: Tensor) -> list[NodeRecord]:
    [graph] = ampcompile.explain(f, outputs="autocast")(*args).graphs
    return list(graph.nodes)


def test_inputs_casts_ops_and_the_output_in_order() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y).relu()

    x, y, low_x, low_y, product, relu, output = records(f, torch.randn(2, 3), torch.randn(3, 4))
    assert [r.kind for r in (x, y, low_x, low_y, product, relu, output)] == [
        "input", "input", "cast", "cast", "op", "op", "output",
    ]  # fmt: skip
    assert (x.dtype, x.shape, x.inputs, x.cast) == ("f32", (2, 3), (), None)
    assert (low_x.dtype, low_x.op, low_x.inputs, low_x.shape) == ("f32>bf16", "aten.mm", (x.name,), (2, 3))
    assert [low_x.cast, low_y.cast] == sorted({low_x.cast, low_y.cast}), "each has its number"
    assert low_x.because and low_x.because == low_y.because
    assert (product.op, product.dtype, product.inputs) == ("aten.mm", "bf16", (low_x.name, low_y.name))
    assert product.because and product.source.startswith(__file__)
    assert (output.op, output.inputs, output.shape) == ("", (relu.name,), ())


def test_a_bodys_values_are_named_after_it_and_the_body_itself_is_no_value() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: (x - 1).t() @ x, (x,))

    found = records(f, torch.randn(2, 2))
    assert len({record.name for record in found}) == len(found)
    inner = [record for record in found if "/" in record.name]
    assert [record.op for record in inner if record.kind == "op"] == [
        "aten.matmul",
        "aten.sub",
        "aten.t",
        "aten.matmul",
    ]
    first, second = dict.fromkeys(record.name.rpartition("/")[0] for record in inner)
    assert all(name.startswith((f"{first}/", f"{second}/")) for record in inner for name in record.inputs)
    assert found.index(inner[0]) == len(found) - len(inner), "after the graph that calls them"
    assert not {first, second} & {record.name for record in found}
