"""What the schemas of ops say."""

import torch
from torch.fx import Graph

from ampcompile.passes.analysis.schema import (
    aliased_arguments,
    arguments_by_name,
    computes,
    name_of,
    operands,
    set_arguments,
    writes,
    written_arguments,
)
from tests.compiling import HIGH

ATEN = torch.ops.aten


def test_all_overloads_have_one_name():
    assert name_of(ATEN.softmax.int) == name_of(ATEN.softmax.int_out) == "aten::softmax"


def test_what_is_written_and_what_is_shared():
    assert written_arguments(ATEN.add_.Tensor) == aliased_arguments(ATEN.add_.Tensor) == {"self"}
    assert written_arguments(ATEN.add.out) == {"out"}
    assert not written_arguments(ATEN.view.default) and aliased_arguments(ATEN.view.default) == {"self"}
    assert not aliased_arguments(ATEN.add.Tensor) and not writes(ATEN.add.Tensor) and writes(ATEN.add_.Tensor)
    assert written_arguments(ATEN._foreach_add_.Scalar) == {"self"}, "lists too"


def test_what_computes():
    assert computes(ATEN.mm.default) and computes(ATEN.max.dim)
    assert not computes(ATEN.view.default) and not computes(ATEN.add_.Tensor) and not computes(ATEN.size.int)


def test_arguments_by_name():
    assert arguments_by_name(ATEN.add.Tensor, (1, 2), {"alpha": 3}) == {"self": 1, "other": 2, "alpha": 3}
    assert arguments_by_name(ATEN.add.Tensor, (1,), {"other": 2}) == {"self": 1, "other": 2}


def test_operands_in_lists_and_out_of_them():
    graph = Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    index = graph.call_function(ATEN.index.Tensor, (a, [None, b]))
    assert list(operands(index)) == [("self", a), ("indices", b)]
    product = graph.call_function(ATEN.addmm.default, (a, b), {"mat2": c})
    assert list(operands(product)) == [("self", a), ("mat1", b), ("mat2", c)]
    assert list(operands(graph.call_function(ATEN.add.Tensor, (a, 1)))) == [("self", a)]


def test_arguments_are_set_by_name_wherever_they_stand():
    assert set_arguments(ATEN.add.Tensor, (1, 2), {}, {"other": 5, "alpha": 3}) == ((1, 5), {"alpha": 3})
    assert set_arguments(ATEN.softmax.int, (1, 0, None), {}, {"dtype": HIGH}) == ((1, 0, HIGH), {})
    assert set_arguments(ATEN.softmax.int, (1, 0), {}, {"dtype": HIGH}) == ((1, 0), {"dtype": HIGH})
