"""Searches of the heap for sharers of weights without a limit, for tests that make many."""

from collections.abc import Iterator

import pytest

from ampcompile.weights import freshness


@pytest.fixture(scope="module", autouse=True)
def searches_are_unlimited() -> Iterator[None]:
    """Whatever time they have taken."""
    share, freshness._SHARE = freshness._SHARE, 1e9
    yield
    freshness._SHARE = share
