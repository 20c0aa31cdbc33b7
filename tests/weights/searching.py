"""Searches of the heap for sharers of weights: cheap and without a limit, for tests that make many."""

import gc
from collections.abc import Iterator

import pytest

from ampcompile.weights import census as weights_census


@pytest.fixture(scope="module", autouse=True)
def searches_are_cheap() -> Iterator[None]:
    """What other tests have left isn't looked at."""
    share, weights_census._SHARE = weights_census._SHARE, 1e9
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    weights_census._SHARE = share
