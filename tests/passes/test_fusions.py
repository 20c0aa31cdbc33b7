"""Fused ops are found where they are, in bodies too."""

import torch
from torch import Tensor

from ampcompile.passes.graph import Fusion, fusions, graphs, note
from tests.passes.captured import captured, settled


def test_a_bodys_fusions_are_found() -> None:
    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False)

    graph = settled(captured(checkpointed, torch.randn(3)))
    inner = [g for g in graphs(graph) if g is not graph]
    assert len(inner) == 1
    node = inner[0].graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    record = Fusion("linear_cross_entropy", "aten.exp", 8)
    note(node, fusion=record)
    assert list(fusions(graph)) == [record]
