"""Views that read bits as other numbers: of weights, of values, of constants. They don't commute with casts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiling import LOW, amp, eager

HALVES, PAIRS = nn.Parameter(torch.empty(16, 8)), nn.Parameter(torch.empty(8, 16))

PROGRAMS = {
    "a weight of another width": lambda x: F.linear(x, HALVES.view(torch.float16)),
    "there and back": lambda x: F.linear(x, PAIRS.view(torch.int32).view(torch.float32)),
    "the upper halves": lambda x: F.linear(x, PAIRS.view(torch.bfloat16)[:, 1::2]),
    "behind a cast that does nothing": lambda x: F.linear(x, PAIRS.to(torch.float32).view(torch.bfloat16)[:, 1::2]),
    "of .data": lambda x: F.linear(x, PAIRS.data.view(torch.int32).view(torch.float32)),
    "without its signs": lambda x: F.linear((x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32), PAIRS),
    "a complex weight": lambda x: F.linear(x, torch.view_as_complex(PAIRS.view(16, 4, 2)).real.repeat(1, 4)),
    "its conjugate": lambda x: F.linear(
        x, torch.view_as_real(PAIRS.view(torch.complex64).conj().resolve_conj()).flatten(1)
    ),
    "a negative view": lambda x: F.linear(x, torch._neg_view(PAIRS)),
    "the conjugate's imaginary part": lambda x: torch.complex(x, x).conj().imag @ PAIRS.t(),
}


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    nn.init.normal_(PAIRS)
    with torch.no_grad():
        HALVES.view(torch.float16).normal_()


@pytest.mark.parametrize("weights", ["cached", "every_call"])
def test_numbers_are_stock_aot_autograds(weights):
    def program(x):
        return {name: f(x) for name, f in PROGRAMS.items()}

    x = torch.randn(4, 16)
    expected = eager(torch.compile(program, backend="aot_eager"), x)
    torch._dynamo.reset()
    for name, found in amp(program, weights=weights)[0](x).items():
        assert found.dtype == expected[name].dtype == LOW and torch.equal(found, expected[name]), name


@pytest.mark.ci
def test_a_constants_magnitude_is_not_that_of_its_bits():
    """The bits of 1.0 are 1065353216 as a number, which float16 doesn't hold: the range guards look at 1.0."""
    bits = torch.full((16, 16), 0x3F800000, dtype=torch.int32)

    def program(x):
        return x @ torch.tensor(bits.tolist(), dtype=torch.int32).view(torch.float32)

    x = torch.randn(4, 16)
    assert amp(program, dtype=torch.float16)[0](x).dtype == torch.float16
