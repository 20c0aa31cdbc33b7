"""A copy holds its weight's numbers rounded as torch rounds them; one that a backward waits for keeps what it holds."""

import pytest
import torch

from tests.weights.bindings import bind
from tests.weights.writers import unsampled

BF16 = torch.bfloat16


@pytest.mark.parametrize("wide", [False, True])
def test_zeros_of_either_sign_are_told_apart(wide: bool) -> None:
    weight, binding = torch.zeros(40, 30), bind([BF16], wide=[wide])
    binding.copies([weight])
    weight.data[unsampled(weight)] = -0.0
    (read,) = binding.copies([weight])
    assert torch.equal(torch.signbit(read), torch.signbit(weight))
    assert read.dtype == (torch.float32 if wide else BF16)
