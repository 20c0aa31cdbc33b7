"""`F.grouped_mm`: in the dtypes of eager autocast, which has no rule for it, where fake tensors know bfloat16 alone."""

import pytest
import torch
import torch.nn.functional as F

from tests.compiling import HALF, HIGH, LOW, amp, eager


def experts(rows, weights, ends):
    return F.grouped_mm(rows, weights, offs=ends)


def operands(dtype=HIGH):
    ends = torch.tensor([4, 8, 16], dtype=torch.int32)
    return torch.randn(16, 8).to(dtype).requires_grad_(), torch.randn(3, 8, 16).to(dtype).requires_grad_(), ends


@pytest.mark.parametrize(
    ("dtype", "lower"),
    [
        (HIGH, "eager"),
        (HIGH, "aot_eager"),
        (HALF, "eager"),
        (LOW, "aot_eager"),
        pytest.param(HIGH, "inductor", marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_eager_autocasts(dtype, lower):
    rows, weights, ends = operands(dtype)
    expected = eager(experts, rows, weights, ends)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (rows, weights), upstream)
    found = amp(experts, lower=lower)[0](rows, weights, ends)
    assert found.dtype == dtype and torch.equal(found, expected)
    assert all(map(torch.equal, torch.autograd.grad(found, (rows, weights), upstream), wanted))


@pytest.mark.parametrize("shapes", [((3, 4, 8), (3, 8, 16)), ((8, 16), (16, 8)), ((3, 4, 8), (8, 16))])
def test_other_ways_to_group(shapes):
    a, b = map(torch.randn, shapes)
    ends = None if len(shapes[0]) == len(shapes[1]) == 3 else operands()[2]
    expected = eager(experts, a, b, ends)
    found = amp(experts)[0](a, b, ends)
    assert found.stride() == expected.stride() and torch.equal(found, expected)


def test_operands_of_two_dtypes_are_widened():
    """Eager autocast raises."""
    rows, weights, ends = operands()
    linear = torch.nn.Linear(8, 8)
    found = amp(lambda x: experts(linear(x), weights, ends))[0](rows)
    expected = experts(eager(linear, rows).float(), weights, ends)
    assert found.dtype == HIGH and torch.equal(found, expected)
