"""Weights and buffers whose sizes are symbols: cast in the graph, whatever their layout is in a call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompile.passes.graph import notes_of
from tests.compiling import compiled, eager
from tests.pairs import pairs


class Rows(nn.Module):
    """A matrix with rows that come and go: an attribute, a buffer or a parameter."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.other = nn.Linear(8, 8)
        self.hold(torch.randn(16, 8))

    def hold(self, rows):
        if self.kind == "attribute":
            self.rows = rows
        elif self.kind == "buffer":
            self.register_buffer("rows", rows)
        else:
            self.rows = nn.Parameter(rows)

    def forward(self, x):
        return F.linear(self.other(x), self.rows)


@pytest.mark.parametrize(
    ("kind", "given", "lower"),
    pairs(["attribute", "buffer", "parameter"], ["data", "another tensor"], ["aot_eager", "eager"]),
)
def test_results_have_the_rows_of_their_call(kind, given, lower):
    model, all_rows = Rows(kind), torch.randn(16, 8)
    run = torch.compile(model, backend="amp", dynamic=True, options={"lower": lower})
    x = torch.randn(3, 8)
    with torch.no_grad(), torch._dynamo.config.patch(force_parameter_static_shapes=False):
        for count in (16, 8, 12, 8, 16):
            if given == "data":
                model.rows.data = all_rows[:count]
            else:
                model.hold(all_rows[:count].clone())
            torch._dynamo.mark_dynamic(model.rows, 0)
            found = run(x)
            assert found.shape == (3, count) and torch.equal(found, eager(model, x))


def test_a_weight_of_symbolic_sizes_is_cast_in_the_graph_and_others_are_hoisted():
    model = Rows("buffer")
    run, recorder = compiled(model, dynamic=True)
    torch._dynamo.mark_dynamic(model.rows, 0)
    with torch.no_grad(), torch._dynamo.config.patch(force_parameter_static_shapes=False):
        run(torch.randn(3, 8))
    inputs = recorder.graphs[0].graph.graph.find_nodes(op="placeholder")
    assert [node.meta["val"].shape for node in inputs if notes_of(node).copy] == [(8, 8), (8,)]
