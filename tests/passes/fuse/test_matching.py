"""What the fuse passes share: when a fusion pays, and where one is found."""

import pytest
import torch
from torch import Tensor

from ampcompile.kernels import usable
from ampcompile.passes.fuse import matching
from ampcompile.passes.graph import note
from tests.passes.captured import captured, settled

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_counts_decide_unless_the_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, asked = matching.FusionCost("auto"), matching.FusionCost("linear")
    assert auto.considers("linear") and asked.considers("linear") and not asked.considers("linear_cross_entropy")
    assert matching.FusionCost("linear_cross_entropy+linear").considers("linear")
    assert asked.pays(CPU, 0, 10) and asked.pays(CUDA, None, None)
    assert (
        auto.pays(CUDA, 25, 100)
        and not auto.pays(CUDA, 24, 100)
        and not auto.pays(CUDA, 0, 0)
        and not auto.pays(CUDA, None, 100)
    )
    assert not auto.pays(CPU, 100, 100)
    assert not auto.pays(CUDA, 0, 100, freed=10**12)  # there is no GPU whose memory it would be a part of
    monkeypatch.setattr(matching, "memory_of", lambda device: 10**13)
    assert auto.pays(CUDA, 0, 100, freed=10**12) and not auto.pays(CUDA, 0, 100, freed=10**12 - 1)
    monkeypatch.setattr(matching, "usable", lambda: False)
    assert not auto.pays(CUDA, 100, 100) and not asked.pays(CUDA, 100, 100) and asked.pays(CPU, 100, 100)


def test_a_bodys_fusions_are_found() -> None:
    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False)

    graph = settled(captured(checkpointed, torch.randn(3)))
    inner = [g for g in matching.graphs(graph) if g is not graph]
    assert len(inner) == 1
    node = inner[0].graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    record = matching.Fusion("linear", "aten.exp", 8)
    note(node, fusion=record)
    assert list(matching.fusions(graph)) == [(node, record)]
    assert usable.usable()
