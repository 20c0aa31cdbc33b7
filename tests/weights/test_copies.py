"""A copy holds its weight's numbers rounded as torch rounds them; one that a backward waits for keeps what it holds."""

import pytest
import torch
from torch import nn

from tests.kernels.test_native import patterns
from tests.weights.bindings import Case, bind
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


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype, wide: bool) -> None:
    values, binding = patterns(), bind([dtype], wide=[wide])
    (read,) = binding.copies([values])
    expected = values.to(dtype).to(read.dtype)
    assert torch.equal(read, expected) or torch.equal(read[~read.isnan()], expected[~values.isnan()])
    assert torch.equal(read.isnan(), values.isnan())


def test_what_waits_keeps_its_numbers_while_the_weight_goes_on() -> None:
    case = Case()
    x = torch.randn(2, 30, dtype=BF16, requires_grad=True)
    loss = nn.functional.linear(x, case.binding.copies([case.weight, case.frozen])[0]).float().sum()
    expected = case.weight.detach().bfloat16().float().sum(0)
    for _ in range(3):
        case.one(case.weight)
        assert case.right()
    loss.backward()
    torch.testing.assert_close(x.grad[0].float(), expected, rtol=2**-6, atol=0.1)
