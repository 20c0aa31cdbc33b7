"""Which products run in float32 on the CPU: by the options, and by what its units gain."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.config import Options
from ampcompile.passes.analysis.products import WideProducts, is_dense, is_dense_product, runs_in_float32
from tests.compiling import HALF, HIGH, LOW

pytestmark = pytest.mark.cpu(multiplies=(LOW,), faster=())
BOTH, HALVES = frozenset({LOW, HALF}), frozenset({HALF})


@pytest.mark.parametrize(
    ("options", "wide"),
    [
        ({}, WideProducts(HALVES, BOTH, small=True)),
        ({"lower": "aot_eager"}, WideProducts(HALVES, BOTH)),
        ({"lower": "eager"}, WideProducts()),
        ({"products": "torch"}, WideProducts()),
        ({"products": "float32"}, WideProducts(BOTH)),
    ],
)
def test_options_and_the_cpu_decide(options: dict[str, Any], wide: WideProducts) -> None:
    assert WideProducts.on_this_cpu(Options(**options)) == wide
    assert bool(wide) == (wide != WideProducts())


def test_many_rows_are_dense_few_arent() -> None:
    width = 512
    found = {rows: is_dense(rows * width**2, 2 * rows * width + width**2) for rows in (1, 16, 64, 1024)}
    assert is_dense(16 * 256**2, 2 * 16 * 256 + 256**2), "its start takes longer than its bytes"
    assert found == {1: False, 16: False, 64: True, 1024: True}
    assert [runs_in_float32(LOW, rows * width**2, 2 * rows * width + width**2) for rows in found] == [*found.values()]
    assert runs_in_float32(HALF, width**2, width**2) and runs_in_float32(HIGH, width**2, width**2)
    assert runs_in_float32(LOW, 64, 64), "small"


def test_layers_count_as_the_products_they_are_made_of() -> None:
    linear = torch.ops.aten.linear.default

    def layers(x: torch.Tensor, w: torch.Tensor) -> Any:
        few, small = linear(x[:16], w), linear(x[:16, :8], w[:, :8])
        return linear(x, w), few, linear(x, weight=w), linear(x, w[0]), small, x.relu()

    gm = make_fx(layers, tracing_mode="fake", pre_dispatch=True)(torch.randn(512, 512), torch.randn(512, 512))
    found = {str(n.target): is_dense_product(n) for n in gm.graph.nodes if n.op == "call_function"}
    assert found.pop("aten.relu.default") is False
    dense = [is_dense_product(n) for n in gm.graph.nodes if n.target is linear]
    assert dense == [False, True, True, True, False]
