"""Run by test_families.py in a process with TRITON_INTERPRET=1: the GPU's norms, on CPU tensors."""

import os
from itertools import product

import pytest
import torch

from ampcompile.kernels.norm import norm_backward_reference, norm_reference
from ampcompile.kernels.triton import norm as gpu
from ampcompile.kernels.triton import norm_backward as gpu_backward
from tests.kernels.triton.interpreting import as_on_a_gpu

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of arithmetic with infinity and NaN
LOW, HALF, HIGH = torch.bfloat16, torch.float16, torch.float32
WHOLE = 64
WIDTHS = (1, 5, 16, 33, 64, 65, 97)  # several rows a program, one, and rows that are read twice


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A program takes milliseconds here: few of them, so that each has several tiles."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "WHOLE", WHOLE)
    monkeypatch.setattr(gpu, "TILE", 32)
    monkeypatch.setattr(gpu_backward, "PROGRAMS", 2)
    for module in (gpu, gpu_backward):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    for make in ("empty", "empty_like"):
        plain = getattr(torch, make)
        monkeypatch.setattr(torch, make, lambda *a, plain=plain, **kw: plain(*a, **kw).fill_(torch.nan))


def assert_close(found, expected, rounded=HIGH):
    """To a unit in the last place of the narrowest type on the way: what `rounded` is, or the result itself."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            ulps = max({LOW: 2**-7, HALF: 2**-10, HIGH: 2e-5}[dtype] for dtype in (ours.dtype, rounded))
            torch.testing.assert_close(ours, theirs, rtol=ulps, atol=2 * ulps, equal_nan=True)


def operands(width, of_x, of_residual, of_weight, rows=5):
    x = torch.randn(rows, width).to(of_x) + 2
    residual = None if of_residual is None else torch.randn(rows, width).to(of_residual)
    weight, bias = (None, None) if of_weight is None else (torch.randn(width).to(of_weight) for _ in range(2))
    return x, residual, weight, bias


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("centered", [True, False])
def test_forward_and_backward(width, centered):
    kinds = [(LOW, None, HIGH), (HALF, HALF, HALF), (HIGH, LOW, HIGH), (HALF, HIGH, None)]
    for (of_x, of_residual, of_weight), wide, inner in product(kinds, (True, False), (True, False)):
        low = HALF if HALF in (of_x, of_residual) else LOW
        x, residual, weight, bias = operands(width, of_x, of_residual, of_weight, 5 if width <= WHOLE // 2 else 3)
        arguments = x, residual, weight, bias
        found = gpu.forward(*arguments, 1e-5, centered, inner, wide, low)
        expected = norm_reference(*arguments, width, 1e-5, centered, inner, wide, low)
        mean, rstd, h, *_ = expected
        h = x if h is None else h
        rounded = h.dtype if inner else HIGH
        assert_close(found, expected, rounded)
        grads = [torch.randn(x.shape).to(low) for _ in range(3 if inner else 1)]
        grads += [torch.randn(x.shape)] if wide else []
        grad_sum = None if residual is None else torch.randn(x.shape).to(h.dtype)
        second = next((t for t in (of_x, of_residual) if t not in (h.dtype, None)), None)
        wanted = inner, weight is not None, bias is not None and centered, second
        found = gpu_backward.backward(grads, grad_sum, h, weight, mean, rstd, *wanted)
        assert_close(found, norm_backward_reference(grads, grad_sum, h, weight, mean, rstd, width, *wanted), rounded)


@pytest.mark.parametrize("width", [16, 150])
def test_rows_that_are_not_finite_spoil_no_other(width):
    x, _, weight, bias = operands(width, LOW, None, HIGH)
    x[1, 3], x[2, -1], x[4] = torch.inf, torch.nan, 0.0
    found = gpu.forward(x, None, weight, bias, 1e-5, True, False, True, LOW)
    expected = norm_reference(x, None, weight, bias, width, 1e-5, True, False, True, LOW)
    assert_close(found[2:], expected[2:])
    assert found[3][1:3].isnan().all() and found[3][[0, 3, 4]].isfinite().all()


def test_a_row_far_from_zero_keeps_its_digits():
    x = torch.randn(3, 1000) + 1e4
    found = gpu.forward(x, None, None, None, 1e-5, True, False, True, None)
    exact = torch.nn.functional.layer_norm(x.double(), (1000,))
    assert (found[3] - exact).abs().max() < 1e-2
