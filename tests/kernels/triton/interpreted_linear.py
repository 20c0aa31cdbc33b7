"""Run by test_families.py in a process with TRITON_INTERPRET=1: a product with a weight that is rounded on the way."""

import os

import pytest
import torch
from torch.nn import functional as F

from ampcompile.kernels.triton import linear_cast as gpu
from tests.compiling import error
from tests.kernels.test_linear_cast import autocast
from tests.kernels.triton.interpreting import as_on_a_gpu
from tests.pairs import pairs

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of arithmetic with infinity and NaN


@pytest.fixture(autouse=True)
def small_as_on_a_gpu(monkeypatch):
    """A program takes milliseconds here: small tiles."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "wrap_triton", lambda kernel: kernel)  # of torch 2.11: wants compiled kernels
    monkeypatch.setattr(gpu, "FEW", gpu.Tile(16, 16, 32, 1, 1))
    monkeypatch.setattr(gpu, "MANY", gpu.Tile(32, 16, 16, 1, 1))


def operands(rows, features, depth, dtype, bias):
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(features, depth)
    return x, weight, None if bias is None else torch.randn(features).to(bias)


def assert_right(given):
    """From float64, taken of rounded operands, a rounding away; no further than torch's product."""
    x = given[0]
    out = gpu.multiply(*given)
    exact = F.linear(*(None if tensor is None else tensor.to(x.dtype).double() for tensor in given))
    assert out.dtype == x.dtype and out.shape == exact.shape
    step = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * step, atol=1e-5 * (x.shape[1] + 1))
    if out.numel() and x.shape[1]:
        assert error([out], [exact]) <= 1.001 * error([autocast(*given)], [exact])


SIZES = [1, 2, 16, 17, 31, 70], [(16, 32), (1, 1), (33, 47), (70, 100)]
DTYPES, BIASES = [torch.float16, torch.bfloat16], [None, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("rows", "size", "dtype", "bias"), pairs(*SIZES, DTYPES, BIASES))
def test_odd_shapes(rows, size, dtype, bias):
    assert_right(operands(rows, *size, dtype, bias))


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(rows, dtype):
    x, weight, bias = operands(rows, 35, 37, dtype, torch.float32)
    assert_right((x.t().contiguous().t(), weight, bias))
    assert_right((x, weight.t().contiguous().t(), bias))
    assert_right((x[:, ::3], weight[:, ::3], bias))
    assert_right((x[::2], weight[::5], bias[::5]))
    assert_right((x[:1].expand(rows, 37), weight[:, :1].expand(35, 37), bias[3:4].expand(35)))


@pytest.mark.parametrize("shape", [(0, 5, 8), (5, 0, 8), (5, 7, 0)])
def test_empty(shape):
    assert_right(operands(*shape, torch.bfloat16, torch.float32))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_or_nan_number_stays_in_its_row_or_column(dtype, value):
    for which in range(3):
        given = operands(20, 33, 47, dtype, torch.float32)
        given[which].view(-1)[-1] = value
        out = gpu.multiply(*given)
        # Not autocast's product: where a CPU emulates it, an infinite number makes NaN of its whole row.
        expected = F.linear(*(tensor.to(dtype).float() for tensor in given))
        assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
        assert 0 < (~out.isfinite()).sum() < out.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_rounded_once_as_torch_rounds(dtype):
    ties = torch.randint(-(2**31), 2**31, (64,)).bitwise_and(~0xFFFF).to(torch.int32)
    weight = torch.cat([ties + 0x8000, ties + 0x7FFF, ties + 0x8001]).view(torch.float32).nan_to_num()
    weight = torch.cat([weight.clamp(-6e4, 6e4), torch.tensor([65519.0, 65520.0, 3e-8, 2.9e-8, 1e-41, -0.0])])[:, None]
    out = gpu.multiply(torch.ones(3, 1, dtype=dtype), weight, None)
    assert torch.equal(out, weight.to(dtype).t().expand(3, -1))


def test_few_rows_take_the_narrow_tile(monkeypatch):
    given = operands(16, 33, 47, torch.bfloat16, None)
    monkeypatch.setattr(gpu, "MANY", None)
    assert_right(given)
