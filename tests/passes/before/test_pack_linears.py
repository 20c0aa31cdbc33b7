"""Linear layers on the CPU read packed copies, where that changes no bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels.packed_linear import PACKED_LINEAR, available
from ampcompile.passes.before.pack_linears import PackLinears
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.weights.packing import PAYS
from tests.passes.rewriting import count, rewritten

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")


class Layers(nn.Module):
    def __init__(self, inner: int = 64, outer: int = 80) -> None:
        super().__init__()
        self.a = nn.Linear(inner, outer)
        self.b = nn.Linear(outer, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.b(self.a(x)))))


def layouts(module: nn.Module, *args: Tensor, **options: Any) -> tuple[int, list[str]]:
    (graph,) = rewritten(module, *args, lower="inductor", **options)
    inputs = graph.graph.graph.find_nodes(op="placeholder")
    return count(graph, PACKED_LINEAR), sorted(n.meta["amp_copy"].layout for n in inputs if "amp_copy" in n.meta)


def test_fires_where_no_gradient_is_wanted() -> None:
    # Two uses of a weight share its packed form; a bias stays strided.
    with torch.no_grad():
        assert layouts(Layers(), torch.randn(3, 64)) == (4, ["packed", "packed", "strided"])
    assert layouts(Layers(), torch.randn(3, 64)) == (0, ["strided", "strided", "strided"])


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.t()) + x @ self.weight


class Biased(nn.Module):
    """`part`: of a vector of 128 numbers, as the bias."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.weight, self.vector, self.part = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(128)), part

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.vector[self.part])


class Computed(Biased):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, (x.t() @ x)[:, 1])


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Functional, {}),
        (lambda: Biased(slice(1)), {}),
        (lambda: Biased(slice(None, None, 2)), {}),
        (lambda: Computed(slice(0)), {}),
        (lambda: Layers(64, 63), {}),
        (Layers, {"weights": "every_call"}),
        (Layers, {"dtype": torch.float16}),
    ],
    ids=[
        "a view of a weight, and a plain product",
        "one number for all features",
        "a bias whose numbers lie apart",
        "a computed bias",
        "too small",
        "no copies",
        "no packed product of that dtype",
    ],
)
def test_declines(module: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    with torch.no_grad():
        assert layouts(module(), torch.randn(3, 64), **options)[0] == 0


def test_a_part_of_a_vector_is_a_bias() -> None:
    with torch.no_grad():
        assert layouts(Biased(slice(64, None)), torch.randn(3, 64))[0] == 1


def test_idempotent() -> None:
    with torch.no_grad():
        (graph,) = rewritten(Layers(), torch.randn(3, 64), lower="inductor")
    assert PackLinears(frozenset({torch.bfloat16})).apply(graph.graph) == 0
    assert count(graph, WEIGHT_COPY) == 2


def test_same_bits_and_the_next_call_sees_an_update() -> None:
    x, plain, results = torch.randn(5, 64), Layers(), []
    for weights in ("cached", "every_call"):
        model = copy.deepcopy(plain)
        compiled = torch.compile(model, backend="amp", options={"weights": weights})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for calls in (1, PAYS + 1, 1):  # plain weights, then packed ones, then plain ones again
            with torch.no_grad():
                found += [compiled(x) for _ in range(calls)]
            optimizer.zero_grad()
            found.append(compiled(x))
            found[-1].square().sum().backward()
            optimizer.step()
        results.append(found)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
