"""An address is covered exactly where an extent holds it, whichever way extents meet."""

import random
from collections.abc import Iterator

import pytest

from ampcompile.weights.store import store


@pytest.fixture(autouse=True)
def ranges_as_before() -> Iterator[None]:
    before = list(store.ranges)
    yield
    store.ranges[:] = before


@pytest.mark.parametrize(
    ("extents", "ends"),
    [
        ([], []),
        ([(3, 5)], [3, 5]),
        ([(7, 9), (3, 5)], [3, 5, 7, 9]),
        ([(3, 5), (5, 7)], [3, 7]),  # they meet
        ([(3, 9), (4, 5)], [3, 9]),  # one holds the other
        ([(3, 6), (5, 8), (8, 8)], [3, 8]),
        ([(4, 4)], []),  # nothing
    ],
)
def test_extents_are_merged(extents: list[tuple[int, int]], ends: list[int]) -> None:
    store.set_ranges(extents)
    assert store.ranges == ends


def test_what_is_covered_is_what_an_extent_holds() -> None:
    for _ in range(50):
        extents = [(begin, begin + random.randrange(6)) for begin in random.choices(range(40), k=5)]
        store.set_ranges(extents)
        for address in range(-1, 50):
            assert bool(store.covers(address)) == any(begin <= address < end for begin, end in extents)
