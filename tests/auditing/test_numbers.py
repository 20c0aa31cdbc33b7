"""Errors, overflows and flushes to zero of known numbers."""

import math

import pytest
import torch

from ampcompile.auditing.numbers import Numbers, combine, measure, ratio, relative_error, squares

HALF, WIDE = torch.float16, torch.float64


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=WIDE)


@pytest.mark.parametrize(
    ("found", "exact", "error"),
    [
        ((3.0, 4.0), (3.0, 4.0), 0.0),
        ((3.0, 4.5), (3.0, 4.0), 0.1),
        ((0.0,), (0.0,), 0.0),
        ((1.0,), (0.0,), math.inf),
        ((math.inf, 4.0), (3.0, 4.0), math.inf),
        ((math.nan, 4.0), (3.0, 4.0), math.inf),
        ((math.inf, 4.5), (1e39, 4.0), 0.125),  # float32 would be infinite, too
        ((math.nan, 4.5), (math.nan, 4.0), 0.125),
    ],
)
def test_the_error_is_a_distance_over_a_norm(found: tuple[float, ...], exact: tuple[float, ...], error: float) -> None:
    assert relative_error(torch.tensor(found), wide(*exact)) == pytest.approx(error)


def test_squares_add_up_over_tensors() -> None:
    assert squares(torch.tensor([1.0, 5.0]), wide(3.0, 4.0)) == pytest.approx((5.0, 25.0))
    assert squares(torch.tensor([math.inf]), wide(3.0)) == (math.inf, 9.0)
    assert ratio(5.0 + 4.0, 25.0 + 11.0) == 0.5


def test_what_is_seen_of_one_op() -> None:
    found = [torch.tensor([math.inf, 0.0, 8.0, -60000.0], dtype=HALF), torch.tensor([0.0, math.nan])]
    local = [wide(70000.0, 1e-9, 10.0, -60000.0), wide(0.0, 1e39)]
    exact = [wide(70000.0, 1e-9, 8.0, -60000.0), wide(0.0, 1.0)]
    seen = measure(found[:1], local[:1], None)
    assert seen == Numbers(math.inf, None, 60000.0, 0.25, 0.25, 4)
    seen = measure(found, local, exact)
    assert (seen.local, seen.cumulative) == (math.inf, math.inf)
    assert (seen.overflowed, seen.flushed, seen.elements) == (1 / 6, 1 / 6, 6), "of all elements"
    alone = measure(found, None, exact)
    assert (alone.local, alone.overflowed, alone.flushed) == (None, 0, 0)


def test_the_smallest_number_that_counts_as_flushed_is_float32s() -> None:
    smallest = 2.0**-149
    for exact, flushed in ((smallest, 1.0), (-smallest, 1.0), (smallest / 2, 0.0), (0.0, 0.0)):
        assert measure([torch.zeros(1)], [wide(exact)], None).flushed == flushed


def test_nothing_has_no_numbers() -> None:
    assert measure([torch.ones(0)], [wide()], [wide()]) == Numbers(0.0, 0.0, 0.0, 0.0, 0.0, 0)


def test_together_they_have_the_worst_errors_and_shares_of_all_elements() -> None:
    first, second = Numbers(0.1, None, 3.0, 0.5, 0.0, 10), Numbers(0.3, 0.2, 2.0, 0.0, 0.2, 30)
    assert combine([first, second]) == Numbers(0.3, 0.2, 3.0, 0.125, pytest.approx(0.15), 40)
    assert combine([Numbers(None, None, 1.0, 0.0, 0.0, 0)]) == Numbers(None, None, 1.0, 0.0, 0.0, 0)
