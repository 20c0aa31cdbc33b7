"""A graph that autograd differentiates as it runs reads copies of weights, with gradients in the weights' dtype."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.replay.bind_weights_eagerly import BindWeightsEagerly
from ampcompile.passes.weight_copy import WEIGHT_COPY, weight_copy


def traced(f):
    weight = torch.randn(3, 5)
    copy = weight.to(torch.bfloat16)
    return make_fx(f, tracing_mode="fake")(weight, copy), weight, copy


def test_an_eager_graph_differentiates_twice_with_gradients_in_the_weights_dtype() -> None:
    graph, weight, copy = traced(lambda w, c: (weight_copy(w, c, c.dtype).float() ** 3).sum())
    assert BindWeightsEagerly().apply(graph) == 1
    assert BindWeightsEagerly().apply(graph) == 0
    graph.recompile()
    assert not graph.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
    weight.requires_grad_()
    (first,) = torch.autograd.grad(graph(weight, copy), weight, create_graph=True)
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, 3 * copy.float() ** 2, rtol=1e-2, atol=1e-2)
    first.sum().backward()  # through the cast of the gradient: the copy itself has no history
