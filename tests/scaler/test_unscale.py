"""Unscaling in place: all gradients are checked before one changes, and torch's op finds no less than our kernel."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels import native
from ampcompile.scaler.generic import has_kernel, unscale_by_torch, unscale_grads
from tests.scaler.cases import assert_equal

CPU = torch.device("cpu")


def optimizer_of(*grads: Tensor | None) -> torch.optim.Optimizer:
    """With a parameter for each gradient, in a group of its own."""
    params = []
    for grad in grads:
        param = nn.Parameter(torch.ones(3 if grad is None else grad.shape, dtype=None if grad is None else grad.dtype))
        param.grad = grad
        params.append({"params": [param]})
    return torch.optim.SGD(params, lr=0.1)


def unscaled(optimizer: Any, multiplier: float, allow_fp16: bool = True) -> dict[torch.device, Tensor]:
    return unscale_grads(optimizer, torch.tensor([multiplier]), torch.zeros(1), allow_fp16, {})


def test_gradients_of_all_kinds_are_multiplied_and_share_a_flag() -> None:
    grads = [torch.full((4,), 8.0, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.float64)]
    sparse = torch.sparse_coo_tensor([[1, 1]], [8.0, 4.0], (3,), check_invariants=False)
    flags = unscaled(optimizer_of(*grads, None, sparse), 0.25)
    assert [grad.tolist() for grad in grads] == [[2.0] * 4] * 3
    assert sparse._values().tolist() == [2.0, 1.0]
    assert list(flags) == [CPU] and flags[CPU].item() == 0


def test_without_gradients_there_are_no_flags() -> None:
    assert unscaled(optimizer_of(None), 0.5) == {}


def test_all_are_checked_before_one_changes() -> None:
    first = torch.ones(2)
    optimizer = optimizer_of(first, torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        unscaled(optimizer, 0.5, allow_fp16=False)
    assert first.tolist() == [1, 1]
    optimizer.param_groups[1]["params"] = ["a name"]
    with pytest.raises(AssertionError, match=r"expected param to be torch\.Tensor, got str"):
        unscaled(optimizer, 0.5)
    assert first.tolist() == [1, 1]


@pytest.mark.skipif(not native.available(), reason="no C++ compiler works here")
def test_our_kernel_takes_dense_gradients_that_share_no_memory() -> None:
    plain = torch.ones(4, 6)
    assert has_kernel([plain, torch.ones(6, 4).t()])
    assert not has_kernel([plain, plain.view(-1)]), "an element would be multiplied twice"
    assert not has_kernel([plain[:, ::2]]), "not dense"
    assert not has_kernel([plain.double()])
    assert not has_kernel([torch.ones(3, device="meta")])
    assert not has_kernel([torch._neg_view(plain)])
    assert not has_kernel([plain.as_subclass(type("Other", (Tensor,), {}))])


@pytest.mark.parametrize(
    ("grads", "multiplier", "overflow"),
    [
        ([1.0, 2.0], 0.5, 0),
        ([1.0, math.inf], 0.5, 1),
        ([1.0, 3e38], 2.0, 1),  # only once multiplied
        ([1.0, 2.0], 0.0, 1),  # of an infinite scale
    ],
)
def test_torchs_op_finds_overflows_before_and_after(grads: list[float], multiplier: float, overflow: int) -> None:
    grad, found_inf = torch.tensor(grads), torch.zeros(1)
    unscale_by_torch([grad], torch.tensor(multiplier), found_inf)
    assert_equal([grad], [torch.tensor(grads) * multiplier])
    assert found_inf.item() == overflow
