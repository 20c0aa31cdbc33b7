"""After differentiation a read of a copy is the copy, unless somebody could keep it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.passes.weight_copy import weight_copy


def traced(f) -> tuple[GraphModule, Tensor, Tensor]:
    weight = torch.randn(3, 5)
    copy = weight.to(torch.bfloat16)
    return make_fx(f, tracing_mode="fake")(weight, copy), weight, copy


def test_fires_and_gives_the_copys_bits() -> None:
    graph, weight, copy = traced(lambda w, c: weight_copy(w, c, c.dtype) @ weight_copy(w, c, c.dtype).t())
    assert BindWeights().apply(graph) == 2
    graph.recompile()
    assert torch.equal(graph(weight, copy), copy @ copy.t())


RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda c: c,
    "a view": lambda c: c.t()[1:],
    "a part": lambda c: c.split(2)[1],
    "a view that no schema tells of": lambda c: torch.ops.aten._unsafe_view(c, [15]),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_of_a_copy_is_cloned(name: str) -> None:
    view = RETURNED[name]
    graph, weight, copy = traced(lambda w, c: (view(weight_copy(w, c, c.dtype)), w + 1))
    BindWeights().apply(graph)
    graph.recompile()
    result, _ = graph(weight, copy)
    assert torch.equal(result, view(copy))
    assert result.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()


def test_declines_and_is_idempotent() -> None:
    graph, _, _ = traced(lambda w, c: w @ c.t().float())
    before = str(graph.graph)
    assert BindWeights().apply(graph) == 0
    assert str(graph.graph) == before
