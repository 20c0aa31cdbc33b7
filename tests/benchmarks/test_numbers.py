"""Errors are those of all numbers together, compared piece by piece."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import numbers as module
from benchmarks.numbers import relative_error


def test_relative_error_of_several_tensors() -> None:
    expected = [torch.randn(3, 4), torch.randn(5)]
    assert relative_error([1.01 * tensor for tensor in expected], expected) == pytest.approx(0.01, rel=1e-3)
    assert relative_error([tensor.clone() for tensor in expected], expected) == 0


def test_large_tensors_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, the logits of a batch and what is computed of them were 26 GB."""
    monkeypatch.setattr(module, "CHUNK", 8)
    expected, sizes = [torch.randn(7, 9).t(), torch.randn(())], list[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
                sizes.append(result.numel())
            return result

    with Sizes():
        assert relative_error([1.01 * tensor for tensor in expected], expected) == pytest.approx(0.01, rel=1e-3)
    assert max(sizes) == 8
