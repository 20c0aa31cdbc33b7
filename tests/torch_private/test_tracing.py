"""Every value has a node of its own, users see nothing of fakes, and the largest magnitude of a constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node

from ampcompile.torch_private import tracing

aten = torch.ops.aten


def test_an_op_that_returns_its_argument_has_a_node_and_the_argument_keeps_its_own() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        cast = h.float()
        return cast.exp(), h.cos()

    graph = tracing.trace_pre_dispatch(f, [torch.randn(3)], lambda op, args, kwargs: False).graph
    nodes: dict[Any, Node] = {node.target: node for node in graph.nodes}
    (cast,) = (node for target, node in nodes.items() if target in (aten.to.dtype, aten._to_copy.default))
    assert nodes[aten.cos.default].args[0] is nodes[aten.sin.default]
    assert nodes[aten.exp.default].args[0] is cast


def test_a_user_s_hooks_see_nothing_of_what_is_computed_on_fakes() -> None:
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda saved: saved):
        with tracing.computing_on(FakeTensorMode()):
            torch.ones(3, requires_grad=True).sin()
        assert not seen
        torch.ones(3, requires_grad=True).sin()
    assert len(seen) == 1


@pytest.mark.parametrize("fake", [True, False])
def test_a_graph_s_fakes_are_computed_with_and_autocast_excluded(fake: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    if fake:
        x.meta["val"] = FakeTensorMode().from_tensor(torch.ones(2, 2))
    with torch.autocast("cpu", enabled=fake), tracing.on_fakes_of(GraphModule({}, graph)):
        assert tracing.fakes_only() == fake
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("constant", "largest"),
    [
        (torch.tensor([1.0, -3.0, float("inf"), float("nan")]), 3.0),
        (torch.tensor([3 + 4j]), 5.0),
        (torch.tensor([], dtype=torch.bfloat16), 0.0),
        (torch.tensor([float("nan")]), 0.0),
        (torch.tensor([-7]), 7.0),
    ],
)
def test_the_largest_finite_magnitude_is_found_among_fakes_too(constant: Tensor, largest: float) -> None:
    assert tracing.largest_magnitude(constant) == largest
    with FakeTensorMode():
        assert tracing.largest_magnitude(constant) == largest
