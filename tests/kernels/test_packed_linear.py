"""A packed product has the bits of the plain one."""

import pytest
import torch
from torch.nn import functional as F

from ampcompile.kernels.packed_linear import LinearBlocks, available, packed_linear
from tests.kernels.references import packed_linear_reference

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not available(dtype), reason=f"oneDNN has no {dtype} products here"))
    for dtype in (torch.bfloat16, torch.float32)
]
SHAPES = [((1,), 67, 65), ((3, 5), 64, 80), ((64,), 100, 136), ((2, 1, 3), 73, 97), ((130,), 64, 256)]
SHAPES += [((64,), 400, 120), ((7,), 512, 768)]


def operands(
    dtype: torch.dtype, batch: tuple[int, ...], inner: int, outer: int, bias: bool
) -> tuple[torch.Tensor, ...]:
    """Numbers of 8 bits in either type."""
    x = torch.randn(*batch, inner).bfloat16().to(dtype)
    weight = torch.randn(outer, inner).bfloat16().float()
    return x, weight, torch.randn(outer).bfloat16().to(dtype) if bias else None


@pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "inner", "outer"), SHAPES)
def test_same_bits_as_the_reference(batch: tuple[int, ...], inner: int, outer: int, bias: bool) -> None:
    x, weight, b = operands(torch.bfloat16, batch, inner, outer, bias)
    copy = weight.to(torch.bfloat16)
    ours = packed_linear(x, weight, LinearBlocks().pack(copy), b)
    theirs = packed_linear_reference(x, weight, b)
    assert torch.equal(ours, theirs)
    assert torch.equal(packed_linear(x, weight, copy, b), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype: torch.dtype) -> None:
    x, weight, b = operands(dtype, (40,), 300, 50, bias=True)
    copy = weight.to(dtype)
    exact = F.linear(x.double(), copy.double(), b.double())
    rounded = F.linear(x, copy, b)
    for form in (copy, LinearBlocks().pack(copy), copy.t().contiguous().t()):
        ours = packed_linear(x, weight, form, b)
        assert ours.dtype == dtype and ours.shape == exact.shape
        assert (ours.double() - exact).norm() <= (rounded.double() - exact).norm() * (
            1.0001 if dtype.itemsize == 2 else 2
        )
        assert (ours.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_is_of_the_unrounded_sums(dtype: torch.dtype, approximate: str) -> None:
    x, weight, b = operands(dtype, (40,), 64, 80, bias=True)
    weight /= 8
    exact = F.gelu(F.linear(x.double(), weight.to(dtype).double(), b.double()), approximate=approximate)
    for form in (weight.to(dtype), LinearBlocks().pack(weight.to(dtype))):
        ours = packed_linear(x, weight, form, b, approximate)
        if dtype.itemsize == 2:
            assert (ours != exact.to(dtype)).double().mean() < 0.01, (
                "rounded once, but where the sum's own error counts"
            )
        else:
            assert torch.allclose(ours.double(), exact, rtol=1e-4, atol=1e-5)
