"""Errors, overflows and flushes to zero of known numbers."""

import math

import pytest
import torch

from ampcompile.auditing.numbers import (
    Numbers,
    combine,
    find_not_finite,
    measure,
    ratio,
    relative_error,
    squares,
)

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
        ((3.0, 4.0), (math.nan, 4.0), math.inf),  # float64 alone
        ((3.0, 4.0), (math.inf, 4.0), math.inf),
        ((math.nan, math.inf), (math.inf, math.inf), math.nan),  # nothing to compare
        ((math.inf,), (1e39,), math.nan),
        ((), (), 0.0),
    ],
)
def test_the_error_is_a_distance_over_a_norm(found: tuple[float, ...], exact: tuple[float, ...], error: float) -> None:
    assert relative_error(torch.tensor(found), wide(*exact)) == pytest.approx(error, nan_ok=True)


def test_squares_add_up_over_tensors() -> None:
    assert squares(torch.tensor([1.0, 5.0]), wide(3.0, 4.0)) == pytest.approx((5.0, 25.0))
    assert squares(torch.tensor([math.inf]), wide(3.0)) == (math.inf, 9.0)
    assert ratio(5.0 + 4.0, 25.0 + 11.0) == 0.5


def test_what_is_seen_of_one_op() -> None:
    found = [torch.tensor([math.inf, 0.0, 8.0, -60000.0], dtype=HALF), torch.tensor([0.0, math.nan])]
    local = [wide(70000.0, 1e-9, 10.0, -60000.0), wide(0.0, 1e39)]
    exact = [wide(70000.0, 1e-9, 8.0, -60000.0), wide(0.0, 1.0)]
    seen = measure(found[:1], local[:1], None)
    assert seen == Numbers(math.inf, None, 60000.0, 0.25, 0.25, 4, 0.25, 0.0)
    seen = measure(found, local, exact)
    assert (seen.local, seen.cumulative) == (math.inf, math.inf)
    assert (seen.overflowed, seen.flushed, seen.elements) == (1 / 6, 1 / 6, 6), "of all elements"
    alone = measure(found, None, exact)
    assert (alone.local, alone.overflowed, alone.flushed) == (None, 0, 0)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "exact", "mixed", "high"),
    [
        (1.0, 1.0, False, False),
        (NAN, NAN, True, True),
        (NAN, 1.0, True, False),
        (1.0, NAN, False, True),
        (NAN, INF, True, True),
        (INF, INF, False, False),  # as a mask has it
        (INF, -INF, True, True),
        (INF, 1e39, False, False),  # float32 would have it too
        (INF, 1.0, True, False),
        (1.0, INF, False, True),
        (3e38, 1e39, False, False),
    ],
)
def test_infinities_that_both_runs_have_are_as_they_should_be(
    found: float, exact: float, mixed: bool, high: bool
) -> None:
    in_mixed, in_exact = find_not_finite(torch.tensor([found, 0.0]), wide(exact, 0.0))
    assert (in_mixed.tolist(), in_exact.tolist()) == ([mixed, False], [high, False])
    seen = measure([torch.tensor([found, 0.0])], None, [wide(exact, 0.0)])
    assert (seen.not_finite, seen.not_finite_exact) == (mixed / 2, high / 2)


def test_without_a_run_in_high_precision_what_the_mixed_one_has_counts() -> None:
    seen = measure([torch.tensor([NAN, INF, -INF, 1.0])], None, None)
    assert (seen.not_finite, seen.not_finite_exact) == (0.25, 0.0)
    assert measure([torch.tensor([NAN])], [wide(1.0)], None).not_finite == 1, "the op alone stands for it"
    numbers = torch.tensor([complex(NAN, 0), complex(INF, 0), 1j])
    assert measure([numbers], [numbers.to(torch.complex128)], None).not_finite_exact == pytest.approx(1 / 3)


def test_the_smallest_number_that_counts_as_flushed_is_float32s() -> None:
    smallest = 2.0**-149
    for exact, flushed in ((smallest, 1.0), (-smallest, 1.0), (smallest / 2, 0.0), (0.0, 0.0)):
        assert measure([torch.zeros(1)], [wide(exact)], None).flushed == flushed


def test_together_they_have_the_worst_errors_and_shares_of_all_elements() -> None:
    first, second = Numbers(0.1, None, 3.0, 0.5, 0.0, 10), Numbers(0.3, 0.2, 2.0, 0.0, 0.2, 30)
    assert combine([first, second]) == Numbers(0.3, 0.2, 3.0, 0.125, pytest.approx(0.15), 40)
    assert combine([Numbers(None, None, 1.0, 0.0, 0.0, 0)]) == Numbers(None, None, 1.0, 0.0, 0.0, 0)
    lost = Numbers(NAN, NAN, 0.0, 0.0, 0.0, 10, 1.0, 0.5)
    both = combine([lost, second])
    assert (both.local, both.cumulative, both.not_finite, both.not_finite_exact) == (0.3, 0.2, 0.25, 0.125)
    assert math.isnan(combine([lost]).local or 0.0)


def test_nothing_has_no_numbers() -> None:
    assert measure([torch.ones(0)], [wide()], [wide()]) == Numbers(0.0, 0.0, 0.0, 0.0, 0.0, 0)
