"""The GPU's rows of logits, read once, and written over, on CPU tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.kernels import cross_entropy as plain
from ampcompile.kernels.triton import cross_entropy as gpu
from tests.pairs import pairs

# With default options a GPU launches none of these, or few.
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("emulated")]
LOW = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BLOCK", 32)


def both(logits: Tensor, weight: Tensor | None, smoothing: float) -> None:
    """Sums and gradients against the same in plain torch."""
    target = torch.randint(logits.shape[1], (len(logits),))
    target[1::2] = -100
    (lse, weighted), (expected, sums) = (f.row_sums(logits, weight, True) for f in (gpu, plain))
    lost = expected.sum(0).isnan()  # by which of the two parts doesn't matter
    assert torch.equal(lse.sum(0).isnan(), lost)
    torch.testing.assert_close(lse[:, ~lost], expected[:, ~lost], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weighted, sums, equal_nan=True, rtol=1e-4, atol=1e-4)
    kind = plain.Kind("mean", -100, smoothing, 1e-2)
    rows = plain.coefficients(torch.tensor(3.0), expected, target, weight, logits.shape[1], kind)
    found = torch.empty_like(logits).copy_(logits)
    gpu.gradient_(found, expected, target, weight, *rows)
    best = plain.gradient(logits, expected, target, weight, rows)
    ulp = torch.finfo(logits.dtype).eps  # both are rounded, from numbers that differ a little
    torch.testing.assert_close(found, best, equal_nan=True, rtol=max(2e-3, ulp), atol=1e-7)


WIDTHS = [1, 5, 8, 31, 32, 33, 67, 100, 128]


@pytest.mark.parametrize(("width", "weighted", "smoothing", "dtype"), pairs(WIDTHS, [False, True], [0.0, 0.1], LOW))
def test_odd_widths(width: int, weighted: bool, smoothing: float, dtype: torch.dtype) -> None:
    both((4 * torch.randn(5, width)).to(dtype), torch.rand(width) if weighted else None, smoothing)


@pytest.mark.parametrize("dtype", LOW)
def test_rows_that_are_part_of_longer_ones(dtype: torch.dtype) -> None:
    wide = torch.randn(6, 90).to(dtype)
    before = wide.clone()
    part = wide[1::2, 3:70]
    lse, _ = gpu.row_sums(part, None, False)
    torch.testing.assert_close(lse.sum(0), part.float().logsumexp(1))
    ones = torch.ones(3)
    gpu.gradient_(part, lse, torch.full((3,), -1), None, ones, ones, None)
    torch.testing.assert_close(part.float().sum(1), ones, rtol=0.01, atol=0)
    assert torch.equal(wide[::2], before[::2]) and torch.equal(wide[:, 70:], before[:, 70:])


def test_a_transposed_one_is_copied() -> None:
    logits = torch.randn(40, 6).to(torch.bfloat16).t()
    torch.testing.assert_close(gpu.row_sums(logits, None, False)[0].sum(0), logits.float().logsumexp(1))


def test_no_rows() -> None:
    lse, weighted = gpu.row_sums(torch.empty(0, 40, dtype=torch.bfloat16), None, True)
    assert lse.shape == (2, 0) and weighted is not None and weighted.shape == (0,)


PLACES = [(1, 3), (0, slice(None)), (0, slice(0, 64)), (2, slice(1, None))]


@pytest.mark.parametrize(("value", "where", "smoothing"), pairs([torch.inf, -torch.inf, torch.nan], PLACES, [0.0, 0.1]))
def test_infinite_and_nan_logits(where: Any, value: float, smoothing: float) -> None:
    logits = torch.randn(4, 100).to(torch.bfloat16)
    logits[where] = value
    both(logits, None, smoothing)


@pytest.mark.parametrize("dtype", LOW)
def test_the_largest_numbers_do_not_overflow(dtype: torch.dtype) -> None:
    logits = torch.full((2, 70), torch.finfo(dtype).max).to(dtype)
    logits[1] = -logits[1]
    lse, _ = gpu.row_sums(logits, None, False)
    torch.testing.assert_close(lse[1], torch.tensor(70.0).log().expand(2))
    both(logits, None, 0.0)
