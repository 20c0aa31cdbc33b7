"""Who shares memory with whom."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ampcompile.passes.analysis.aliasing import Memory
from tests.passes.captured import captured


def memory(f, *args):
    gm = captured(f, *args, dtype=None)
    return Memory(gm.graph), {node.name: node for node in gm.graph.nodes}


def test_views_share_and_what_is_computed_does_not():
    def f(x):
        y = x.sin()
        z = y.t().reshape(9).view(3, 3)
        y.mul_(2)
        return z.cos() + F.linear(y, y)

    found, nodes = memory(f, torch.randn(3, 3))
    written = {name for name, node in nodes.items() if found.is_written(node)}
    assert written >= {"sin", "t", "reshape", "view"} and not written & {"l_x_", "cos", "linear", "add"}
    assert found.is_seen(nodes["l_x_"]) and found.is_seen(nodes["add"]) and not found.is_seen(nodes["view"])


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
