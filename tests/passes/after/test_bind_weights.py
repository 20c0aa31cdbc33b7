"""After differentiation a read of a copy is the copy, unless somebody could keep it."""

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.after.bind_weights import BindWeights, BindWeightsEagerly
from ampcompile.passes.weight_copy import WEIGHT_COPY, weight_copy


def traced(f) -> tuple[GraphModule, Tensor, Tensor]:
    weight = torch.randn(3, 5)
    copy = weight.to(torch.bfloat16)
    return make_fx(f, tracing_mode="fake")(weight, copy), weight, copy


def test_fires_and_gives_the_copys_bits() -> None:
    graph, weight, copy = traced(lambda w, c: weight_copy(w, c) @ weight_copy(w, c).t())
    assert BindWeights().apply(graph) == 2
    graph.recompile()
    assert torch.equal(graph(weight, copy), copy @ copy.t())


def test_a_returned_copy_is_cloned_a_view_of_it_too() -> None:
    graph, weight, copy = traced(lambda w, c: (weight_copy(w, c), weight_copy(w, c).t()[1:], w + 1))
    BindWeights().apply(graph)
    graph.recompile()
    whole, view, _ = graph(weight, copy)
    assert torch.equal(whole, copy)
    assert torch.equal(view, copy.t()[1:])
    for result in (whole, view):
        assert result.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()


def test_declines_and_is_idempotent() -> None:
    graph, _, _ = traced(lambda w, c: w @ c.t().float())
    before = str(graph.graph)
    assert BindWeights().apply(graph) == 0
    assert str(graph.graph) == before


def test_an_eager_graph_differentiates_twice_with_gradients_in_the_weights_dtype() -> None:
    graph, weight, copy = traced(lambda w, c: (weight_copy(w, c).float() ** 3).sum())
    assert BindWeightsEagerly().apply(graph) == 1
    assert not graph.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
    weight.requires_grad_()
    (first,) = torch.autograd.grad(graph(weight, copy), weight, create_graph=True)
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, 3 * copy.float() ** 2, rtol=1e-2, atol=1e-2)
    first.sum().backward()  # through the cast of the gradient: the copy itself has no history
