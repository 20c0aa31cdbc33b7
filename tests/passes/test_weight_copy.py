"""The op that stands for a hoisted cast: traced, differentiated, never run."""

import pytest
import torch

from ampcompile.passes.weight_copy import read_copy, weight_copy


def test_it_never_runs() -> None:
    with pytest.raises(AssertionError, match="must be bound"):
        weight_copy(torch.randn(2), torch.randn(2).to(torch.bfloat16), torch.bfloat16)


def test_read_copy_shares_the_copys_memory_and_sends_the_gradient_to_the_weight() -> None:
    weight = torch.randn(3, requires_grad=True)
    copy = weight.detach().to(torch.bfloat16)
    read = read_copy(weight, copy, copy.dtype)
    assert read.data_ptr() == copy.data_ptr()
    read.backward(torch.full((3,), 2.0, dtype=torch.bfloat16))
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert copy.grad is None
