"""Who shares memory with whom."""

import torch
import torch.nn.functional as F
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from ampcompile.passes.analysis.aliasing import Aliases, aliased_operands, base_of, lies_in_a_row, written_operands
from tests.passes.captured import captured


def memory(f, *args):
    gm = captured(f, *args, dtype=None)
    return Aliases(gm.graph), {node.name: node for node in gm.graph.nodes}


def test_views_share_and_what_is_computed_does_not():
    def f(x):
        y = x.sin()
        z = y.t().reshape(9).view(3, 3)
        y.mul_(2)
        return z.cos() + F.linear(y, y)

    found, nodes = memory(f, torch.randn(3, 3))
    written = {name for name, node in nodes.items() if found.is_written(node)}
    assert written >= {"sin", "t", "reshape", "view"} and not written & {"l_x_", "cos", "linear", "add"}
    assert found.is_visible_outside(nodes["l_x_"]) and found.is_visible_outside(nodes["add"])
    assert not found.is_visible_outside(nodes["view"])


def test_the_base_of_a_view_of_views_is_what_was_computed():
    _, nodes = memory(lambda x: x.sin().split(1)[1].t().cos(), torch.randn(3, 3))
    parts = [node for name, node in nodes.items() if name.startswith(("split", "getitem", "t"))]
    assert len(parts) == 5 and {base_of(node) for node in parts} == {nodes["sin"]}
    assert base_of(nodes["cos"]) is nodes["cos"]


def test_a_row_is_a_row_through_views_and_casts_of_an_input():
    def f(x):
        return x[1:].double(), x.double().view(6).float(), x[::2].double(), x.sin()[1:], x.view(2, 3).double()

    _, nodes = memory(f, torch.randn(6))
    (results,) = (node.args[0] for node in nodes.values() if node.op == "output")
    assert [lies_in_a_row(result) for result in results] == [True] * 2 + [False] * 3


def test_an_op_that_may_return_its_operand_shares_with_it():
    def f(x):
        y = x.sin()
        z = F.dropout(y, training=False)
        wide = y.double()
        y.mul_(2)
        return z + 1, wide + 1

    found, nodes = memory(f, torch.randn(3, 3))
    assert found.is_written(nodes["dropout"]) and found.is_written(nodes["sin"])
    assert not any(found.is_written(node) for name, node in nodes.items() if name.startswith("to"))


def test_a_body_writes_into_what_it_is_given_and_may_return_it():
    def calls(body):
        return lambda x: checkpoint(body, x.sin(), use_reentrant=False) + 1

    found, nodes = memory(calls(lambda y: y.t()), torch.randn(3, 3))
    assert not found.is_written(nodes["sin"])
    found, nodes = memory(calls(lambda y: y.mul_(2)), torch.randn(3, 3))
    assert found.is_written(nodes["sin"])


def last(f, *args):
    node = captured(f, *args, dtype=None).graph.output_node().all_input_nodes[0]
    return node, node.all_input_nodes


def test_what_an_op_writes_and_what_its_result_shares():
    x = torch.randn(3, 3)
    node, operands = last(lambda a, b: a.sin().add_(b), x, x)
    assert written_operands(node) == aliased_operands(node) == operands[:1]
    node, operands = last(lambda a, b: a + b, x, x + 1)
    assert written_operands(node) == aliased_operands(node) == [] and len(operands) == 2
    node, operands = last(lambda a: a.split(1)[1], x)
    assert aliased_operands(node) == operands, "a part"
    assert aliased_operands(operands[0]) == operands[0].all_input_nodes, "the whole"


def test_a_norm_writes_its_statistics_though_no_schema_says_so():
    gm = captured(
        lambda x, m, v: F.batch_norm(x, m, v, training=True), torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    )
    (norm,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    assert set(written_operands(norm)) == set(norm.args[3:5]) and written_operands(norm, unsaid=False) == []
    assert all(map(Aliases(gm.graph).is_written, norm.args[3:5])) and not Aliases(gm.graph).is_written(norm.args[0])


def test_what_a_schema_leaves_unsaid():
    x = torch.randn(3, 3)
    for f in (lambda a: F.dropout(a, training=False), lambda a: torch.ops.aten._unsafe_view(a, [9])):
        node, operands = last(f, x)
        assert aliased_operands(node) == operands and aliased_operands(node, unsaid=False) == []
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    one = graph.call_function(torch.ops.aten.einsum.default, ("ij->ji", [a]))
    two = graph.call_function(torch.ops.aten.einsum.default, ("ij,jk->ik", [a, b]))
    assert aliased_operands(one) == [a] and aliased_operands(two) == []


def test_a_cast_shares_only_where_it_has_nothing_to_do():
    x = torch.randn(3, 3)
    same, operands = last(lambda a: a.float(), x)
    assert aliased_operands(same) == operands
    assert aliased_operands(last(lambda a: a.double(), x)[0]) == []
