"""Run by test_families.py in a process with TRITON_INTERPRET=1: the GPU's group norm, on CPU tensors."""

import os

import pytest
import torch

from ampcompile.kernels.group_norm import group_norm_backward_reference, group_norm_reference
from ampcompile.kernels.triton import group_norm as gpu
from ampcompile.kernels.triton import group_norm_backward as gpu_backward
from tests.kernels.triton.interpreted_norm import HALF, HIGH, LOW, assert_close
from tests.kernels.triton.interpreting import as_on_a_gpu

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of arithmetic with infinity and NaN
# A tile a row, several of channels, several of places; places that fill a tile, that don't, and none but one.
SHAPES = [(2, 4, 3), (1, 6, 16), (2, 10, 4, 4), (1, 6, 7, 11), (3, 20)]
KINDS = [(LOW, None, HIGH), (HALF, HALF, HALF), (HIGH, LOW, HIGH), (HALF, HIGH, None)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A program takes milliseconds here: few of them, so that each has several tiles."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "TILE", 32)
    for module in (gpu, gpu_backward):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    for make in ("empty", "empty_like"):
        plain = getattr(torch, make)
        monkeypatch.setattr(torch, make, lambda *a, plain=plain, **kw: plain(*a, **kw).fill_(torch.nan))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("silu", [True, False])
def test_forward_and_backward(shape, silu):
    for (of_x, of_residual, of_weight), several in zip(KINDS, (True, False, True, False), strict=True):
        low = HALF if HALF in (of_x, of_residual) else LOW
        x = torch.randn(shape).to(of_x) + 2
        residual = None if of_residual is None else torch.randn(shape).to(of_residual)
        weight, bias = (None if of_weight is None else torch.randn(shape[1]).to(of_weight) for _ in range(2))
        how = silu, several
        given = x, residual, weight, bias, 2, 1e-5, *how, several, low
        found, expected = gpu.forward(*given), group_norm_reference(*given)
        mean, rstd, h, *_ = expected
        h = x if h is None else h
        rounded = h.dtype if several else HIGH
        assert_close(found, expected, rounded)
        grads = [torch.randn(shape).to(low) for _ in range(4 if several else 1)]
        grads += [torch.randn(shape)] if several else []
        grad_sum = None if residual is None else torch.randn(shape).to(h.dtype)
        second = next((t for t in (of_x, of_residual) if t not in (h.dtype, None)), None)
        wanted = several, weight is not None and several, second
        given = grads, grad_sum, h, weight, bias, mean, rstd, 2, *how, *wanted
        assert_close(gpu_backward.backward(*given), group_norm_backward_reference(*given), rounded)


def test_sizes_that_are_symbols_have_tiles_of_their_own(monkeypatch):
    monkeypatch.setattr(gpu, "row_of", lambda x, groups: gpu.Row(3, 77, 1, 16))
    x = torch.randn(1, 6, 7, 11)
    given = x, None, None, None, 2, 1e-5, True, False, True, None
    assert_close(gpu.forward(*given), group_norm_reference(*given))


def test_groups_that_are_not_finite_spoil_no_other():
    x, weight, bias = torch.randn(2, 6, 11).to(LOW), torch.randn(6), torch.randn(6)
    x[0, 1, 3], x[0, 4, 0], x[1, :3] = torch.inf, torch.nan, 0.0
    given = x, None, weight, bias, 2, 1e-5, True, False, True, LOW
    found = gpu.forward(*given)
    assert_close(found[2:], group_norm_reference(*given)[2:])
    assert found[3][0].isnan().all() and found[3][1].isfinite().all()


def test_a_group_far_from_zero_keeps_its_digits():
    x = torch.randn(2, 4, 500) + 1e4
    found = gpu.forward(x, None, None, None, 2, 1e-5, False, False, True, None)
    assert (found[3] - torch.nn.functional.group_norm(x.double(), 2)).abs().max() < 1e-2
