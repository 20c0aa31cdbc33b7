"""What the suite compares with sees every bit but a NaN's payload, and its draws are of other weights."""

import itertools
import math

import pytest
import torch

from tests.compiling import draws, same_bits

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_rounds_compares_or_prints_alike_differs(dtype: torch.dtype) -> None:
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    beside = torch.nextafter(torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)).item()
    values = [0.0, -0.0, math.nan, math.inf, -math.inf, largest, -largest, least, least / 2, 1.0, beside]
    for i, a in enumerate(values):
        for j, b in enumerate(values):
            left, right = (torch.tensor([2.0, value], dtype=dtype) for value in (a, b))
            assert same_bits(left, right) == (i == j), (a, b)
            assert same_bits(left[1], right[1]) == (i == j), "without dimensions"
            assert same_bits(torch.complex(*_wide(left, right)), torch.complex(*_wide(left, left))) == (i == j)
            assert same_bits(a, b) == (i == j), "numbers of Python"


def _wide(*values: torch.Tensor) -> list[torch.Tensor]:
    return [value.double() for value in values]


@pytest.mark.parametrize(
    ("dtype", "integers", "first", "second"),
    [
        (torch.float32, torch.int32, 0x7FC00000, 0x7F800001),
        (torch.bfloat16, torch.int16, 0x7FC0, 0x7FFF),
        (torch.float16, torch.int16, 0x7E00, 0x7C01),
    ],
)
def test_every_nan_is_the_same_one(dtype: torch.dtype, integers: torch.dtype, first: int, second: int) -> None:
    a, b = (torch.tensor([value], dtype=integers).view(dtype) for value in (first, second))
    assert same_bits(a, b) and same_bits(a, a.neg()) and not same_bits(a, torch.zeros(1, dtype=dtype))


def test_type_shape_and_number_of_leaves_count() -> None:
    x = torch.zeros(2, 3)
    assert same_bits(x, x.clone()) and same_bits(x, x.t().contiguous().t()) and same_bits((x, [x]), [x, (x,)])
    for other in (x.bfloat16(), x.int(), x.view(3, 2), x.view(1, 2, 3), x[:1], (x, x), (), None, 0.0):
        assert not same_bits(x, other) and not same_bits(other, x)
    assert not same_bits(torch.tensor(0.0), torch.zeros(1))
    z = torch.complex(torch.ones(2), torch.ones(2))
    assert same_bits(z.conj(), z.conj().resolve_conj()) and not same_bits(z.conj(), z)
    assert not same_bits((None, "a"), (None, "b")) and not same_bits(x > 0, x == 0)
    assert not same_bits(torch.float32, torch.float16) and not same_bits(1, 1.0) and not same_bits(1, True)


def test_each_draw_shuffles_the_weights_and_all_models_have_the_same() -> None:
    model, exact = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6).double()
    given, found = model.weight.detach().clone(), []
    for draw in draws(model, exact, count=3):
        assert draw == len(found) and same_bits(exact.weight, model.weight.double())
        found.append(model.weight.detach().clone())
    assert same_bits(found[0], given) and not any(torch.equal(a, b) for a, b in itertools.pairwise(found))
    assert all(same_bits(each.flatten().sort()[0], given.flatten().sort()[0]) for each in found)
