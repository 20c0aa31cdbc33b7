"""After differentiation the copies that readers of a fused op had are one tensor."""

import torch
from torch.fx import symbolic_trace

from ampcompile.kernels.norm import COPIED
from ampcompile.passes.after.merge_copies import MergeCopies


def joint(f):
    graph = symbolic_trace(f)
    return graph, MergeCopies().apply(graph)


def test_readers_share_one_tensor():
    def f(x):
        y = x.exp()
        return COPIED(y).sin() + COPIED(COPIED(y)).cos() + y

    graph, merged = joint(f)
    x = torch.randn(5)
    assert merged == 3 and not graph.graph.find_nodes(op="call_function", target=COPIED)
    assert torch.equal(torch.fx.GraphModule(graph, graph.graph)(x), x.exp().sin() + x.exp().cos() + x.exp())
    assert MergeCopies().apply(graph) == 0, "idempotent"


def test_what_is_returned_stays_a_tensor_of_its_own():
    graph, merged = joint(lambda x: (COPIED(x), COPIED(x).sin()))
    assert merged == 1 and len(graph.graph.find_nodes(op="call_function", target=COPIED)) == 1
