"""What a cast's record says: where from, how large, whether it still runs; and what dtype an op computes in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import ampcompile
from ampcompile.records.casts import CastRecord, computes_in

LOW, HALF, HIGH, WIDE = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Reads(nn.Module):
    """Products with a view of a weight, a constant, an input's part and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:2].t() @ x[:2]
        y = y @ self.weight.t()
        return y @ torch.eye(4).cumsum(0)


def casts(f: Any, *args: Tensor, **options: Any) -> list[CastRecord]:
    return list(ampcompile.explain(f, outputs="autocast", **options)(*args).casts)


def test_what_is_cast_is_followed_through_views_to_where_it_comes_from() -> None:
    found = casts(Reads(), torch.randn(3, 4), policy="op cumsum=fp32")
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
    assert [(cast.shown, cast.shape) for cast in found if cast.of == "weight"] == [
        *(("weight", (2, 3, 1)), ("bias", (2,))),
        *(("weight", (15, 8)), ("bias", (15,)), ("weight", (4, 5)), ("weight", (15, 5)), ("bias", (15,))),
    ]


def test_a_bodys_inputs_come_from_its_caller() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: (x + 1) @ w, (x, self.weight))

    with torch.no_grad():
        found = casts(Branches(), torch.randn(2, 4))
    assert [(cast.of, cast.shape) for cast in found if cast.op == "aten.matmul"] == [
        ("input", (2, 4)),
        ("weight", (4, 4)),
        ("activation", (2, 4)),
        ("weight", (4, 4)),
    ]


def test_a_cast_runs_in_every_call_unless_it_became_something_else() -> None:
    fates = [("inserted",), ("inserted", "hoisted"), ("shared",), ("inserted", "folded"), ("fused",)]
    found = [CastRecord("aten.mm", "", "", HIGH, LOW, (), 0, "", fate, "weight").runs for fate in fates]
    assert found == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("results", "operands", "dtype"),
    [
        ([LOW], [HIGH], LOW),
        ([torch.int64, HALF], [HIGH], HALF),
        ([torch.bool], [torch.int64, WIDE, LOW], WIDE),
        ([torch.bool], [torch.int64], torch.bool),
        ([], [LOW], LOW),
        ([], [], None),
    ],
)
def test_an_op_computes_in_its_result_or_else_in_its_first_floating_operand(
    results: list[torch.dtype], operands: list[torch.dtype], dtype: torch.dtype | None
) -> None:
    graph = Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    for node, operand in zip(inputs, operands, strict=True):
        node.meta["val"] = torch.empty(1, dtype=operand)
    node = graph.call_function(max, tuple(inputs))
    node.meta["val"] = [torch.empty(1, dtype=result) for result in results]
    assert computes_in(node) == dtype
