"""Run by test_families.py in a process with TRITON_INTERPRET=1: the GPU's softmax, on CPU tensors."""

import os

import pytest
import torch

from ampcompile.kernels.softmax import softmax_backward_reference, softmax_reference
from ampcompile.kernels.triton import norm as tiles
from ampcompile.kernels.triton import softmax as gpu
from tests.kernels.triton.interpreting import as_on_a_gpu

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of arithmetic with infinity and NaN
LOW, HALF, HIGH = torch.bfloat16, torch.float16, torch.float32
WHOLE = 64
WIDTHS = (1, 7, 16, 33, 64, 65, 66, 97)  # several rows a program, one, and rows that are read twice


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A program takes milliseconds here: few of them. Results start as NaN."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(tiles, "WHOLE", WHOLE)
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(gpu, "wrap_triton", lambda kernel: kernel)
    for make in ("empty", "empty_like"):
        plain = getattr(torch, make)
        monkeypatch.setattr(torch, make, lambda *a, plain=plain, **kw: plain(*a, **kw).fill_(torch.nan))


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        ulps = {LOW: 2**-7, HALF: 2**-10, HIGH: 2e-5}[ours.dtype]
        torch.testing.assert_close(ours, theirs, rtol=ulps, atol=ulps / 8, equal_nan=True)


def masks(rows, width):
    """Mask, fill, keep: none, added ones of every shape that broadcasts, replaced and kept values."""
    yield None, None, False
    for shape in ((width,), (rows, width), (2, 1, 1, width), (3, rows, 1), (2, 3, rows, width)):
        yield torch.randn(shape), None, False
        yield torch.randn(shape).to(LOW), None, False
        yield torch.rand(shape) < 0.3, -torch.inf, False
        yield torch.rand(shape) < 0.7, -1e4, True
    yield torch.randn(2, 3, width, rows).transpose(2, 3), None, False


@pytest.mark.parametrize(("turn", "width"), [*enumerate(WIDTHS)])
def test_forward_and_backward(turn, width):
    rows = 2 if width <= WHOLE else 1  # wide ones take seconds
    for i, (mask, fill, keep) in list(enumerate(masks(rows, width)))[turn % 3 :: 3]:  # every mask meets both kinds
        x = (3 * torch.randn(2, 3, rows, width)).to((LOW, HALF, HIGH)[i // 3 % 3])
        x = x.to(LOW) if mask is not None and mask.dtype == LOW else x
        low = x.dtype != HIGH
        kinds = (0.3, 1.0)[i % 2], fill, keep, low and i % 4 < 2, low and mask is not None and mask.dtype == LOW
        dtype = HIGH if i % 5 < 3 else x.dtype
        found, expected = gpu.forward(x, mask, *kinds, dtype), softmax_reference(x, mask, *kinds, dtype)
        assert_close(found[:1], expected[:1])
        given = torch.randn(x.shape).to(dtype), x, mask, *expected[1:], *kinds
        assert_close([gpu.backward(*given)], [softmax_backward_reference(*given)])


@pytest.mark.parametrize("width", [16, 150])
def test_extreme_rows(width):
    x = torch.randn(9, width)
    x[0] = -torch.inf  # nothing to choose from
    x[1, : width - 1] = -torch.inf  # the first tiles are empty
    x[2, 1:] = -torch.inf
    x[3, 5], x[4, 5] = torch.inf, torch.nan
    x[5] = torch.finfo(HIGH).min
    x[6] = 3e38
    x[7, 0] = 3e38
    found, *_ = gpu.forward(x, None, 1.0, None, False, False, False, HIGH)
    torch.testing.assert_close(found, torch.softmax(x, -1), equal_nan=True)
    assert found[0].isnan().all() and found[8].isfinite().all()
