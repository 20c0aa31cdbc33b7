"""Graphs that Dynamo shares between modules of one class can be kept apart, and compiled modules are noticed inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.torch_private import dynamo_modules
from tests.compiling import Looking


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * self.weight + self.shift


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Breaks(), Breaks()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize(("guarded", "graphs"), [(False, 1), (True, 2)])
def test_modules_with_names_get_graphs_of_their_own_after_a_graph_break(guarded: bool, graphs: int) -> None:
    """The first case says that Dynamo still shares one graph."""
    model = Two()
    names = {str(id(module)): name for name, module in model.named_modules() if name}

    def look(gm: torch.fx.GraphModule, inputs: Any) -> bool:
        if guarded:
            dynamo_modules.guard_modules_of_frame(gm, names)
        return any(node.op == "call_function" for node in gm.graph.nodes)

    backend = Looking(look)
    compiled, x = torch.compile(model, backend=backend), torch.randn(3)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(x), model(x))
    assert sum(backend.found) == graphs


def test_parameters_and_buffers_are_told_from_other_inputs() -> None:
    model, loose, x = Breaks(), torch.randn(3), torch.randn(3)

    def look(gm: torch.fx.GraphModule, inputs: Any) -> dict[int, bool]:
        nodes = gm.graph.find_nodes(op="placeholder")
        return {x.data_ptr(): dynamo_modules.is_registered(node) for node, x in zip(nodes, inputs, strict=True)}

    backend = Looking(look)
    torch.compile(lambda x: (x * model.weight + model.shift) * loose, backend=backend)(x)
    (found,) = backend.found
    assert found == {
        model.weight.data_ptr(): True, model.shift.data_ptr(): True, x.data_ptr(): False, loose.data_ptr(): False
    }  # fmt: skip


def test_what_no_source_is_known_of_counts_as_registered() -> None:
    assert dynamo_modules.is_registered(torch.fx.Graph().placeholder("x"))
