"""A packed product has the bits of the plain one."""

import pytest
import torch
from torch.nn import functional as F

from ampcompile.kernels.packed_linear import available, pack, packed_linear, packed_linear_reference

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")

SHAPES = [((1,), 67, 65), ((3, 5), 64, 80), ((64,), 100, 136), ((2, 1, 3), 73, 97), ((130,), 64, 256)]


def operands(batch: tuple[int, ...], inner: int, outer: int, bias: bool) -> tuple[torch.Tensor, ...]:
    x = torch.randn(*batch, inner, dtype=torch.bfloat16)
    weight = torch.randn(outer, inner)
    return x, weight, torch.randn(outer, dtype=torch.bfloat16) if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "inner", "outer"), SHAPES)
def test_same_bits_as_the_reference(batch: tuple[int, ...], inner: int, outer: int, bias: bool) -> None:
    x, weight, b = operands(batch, inner, outer, bias)
    copy = weight.to(torch.bfloat16)
    ours = packed_linear(x, weight, pack(copy), b)
    theirs = packed_linear_reference(x, weight, b)
    assert torch.equal(ours, theirs)
    assert torch.equal(packed_linear(x, weight, copy, b), theirs)


def test_against_float64() -> None:
    x, weight, b = operands((40,), 300, 50, bias=True)
    copy = weight.to(torch.bfloat16)
    ours = packed_linear(x, weight, pack(copy), b)
    exact = F.linear(x.double(), copy.double(), b.double())
    rounded = F.linear(x, copy, b)
    assert (ours.double() - exact).norm() <= (rounded.double() - exact).norm() * 1.0001
    assert (ours.double() - exact).norm() < 0.01 * exact.norm()
