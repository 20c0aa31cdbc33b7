"""Cases in which every two values of any two parameters meet, instead of all combinations of all of them."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairs(*values: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """The fewest that a greedy search finds, always the same ones; `allowed` leaves combinations out."""
    cases = [case for case in product(*map(range, map(len, values))) if allowed(*_at(values, case))]
    missing = {pair for case in cases for pair in _pairs_of(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs_of(case)))
        missing -= _pairs_of(best)
        chosen.append(_at(values, best))
    return chosen


def _pairs_of(case: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(case), 2))


def _at(values: Sequence[Sequence[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(v[i] for v, i in zip(values, case, strict=True))
