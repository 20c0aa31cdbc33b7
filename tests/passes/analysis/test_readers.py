"""Where kernels read a value: who reads it, behind which product, and whether in a loop over rows."""

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.analysis.op_traits import PRODUCTS_AFTER, has
from ampcompile.passes.analysis.readers import is_in_rows, is_of_product, operands_of, place_of_magnitude, readers_of

A, W = torch.ones(8, 4), torch.eye(4, dtype=torch.float16)


def graph_of(f) -> Graph:
    """The graph of a function of A and W."""
    return make_fx(f, tracing_mode="fake")(A, W).graph


def called(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if str(node.target).startswith(f"aten.{op}.")]


def test_readers_are_found_behind_views() -> None:
    graph = graph_of(lambda a, w: ((a.t() + 1) * 2, a.relu()))
    assert [str(node.target) for node in readers_of(next(iter(graph.nodes)))] == [
        "aten.relu.default",
        "aten.add.Tensor",
    ]


def test_a_magnitude_stands_behind_the_product_after_the_first_reader() -> None:
    graph = graph_of(lambda a, w: ((w @ w).relu() @ w).relu() @ w)
    order = {node: i for i, node in enumerate(graph.nodes)}
    first, second, third = products = called(graph, "mm")
    assert products == [node for node in graph.nodes if has(node.target, PRODUCTS_AFTER)]
    for value, behind in ((first, second), (called(graph, "relu")[0], second), (second, third)):
        assert place_of_magnitude(value, order, products) is behind.next
    assert place_of_magnitude(third, order, products) is graph.output_node()


def test_loops_over_rows() -> None:
    cases = {
        "a sum of each row, spread": (lambda a, w: (a * a.sum(1, True)).half() @ w, True),
        "a number for each column": (lambda a, w: (a * a[0]).half() @ w, True),
        "a number for each channel": (lambda a, w: (a.view(2, 4, 4) * a[:2, :1, None]).half().view(8, 4) @ w, False),
        "elementwise": (lambda a, w: (a * a).half() @ w, False),
        "a number for all": (lambda a, w: (a * a[0, 0]).half() @ w, False),
        "stored, and read again": (lambda a, w: (x := a * a.sum(1, True), (x + 1).half() @ w)[1] + x, False),
    }
    for name, (f, expected) in cases.items():
        (cast,) = called(graph_of(f), "_to_copy")
        assert is_in_rows(operands_of(cast)[0]) == expected, name


def test_products_that_are_read_row_by_row() -> None:
    cases = {
        "summed": (lambda a, w: (a.half() @ w).float().sum(1), True),
        "multiplied by a number for each column": (lambda a, w: (a.half() @ w).float() * a[0], True),
        "added up by columns": (lambda a, w: (a.half() @ w).float().sum(0), False),
        "added": (lambda a, w: a.half() @ w + a, False),
    }
    for name, (f, expected) in cases.items():
        (product,) = called(graph_of(f), "mm")
        assert is_of_product(product) and is_in_rows(product) == expected, name


def test_sizes_are_no_operands_of_an_op() -> None:
    graph = make_fx(lambda a: a * a.shape[0], tracing_mode="symbolic")(A).graph
    assert [node.op for node in operands_of(called(graph, "mul")[0])] == ["placeholder"]
