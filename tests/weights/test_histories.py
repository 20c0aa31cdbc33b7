"""Random histories of the table of weights give what casting at every look gives, and cast nothing without need."""

import gc
import os

import pytest

import ampcompile
from tests.weights.histories import History


@pytest.mark.parametrize("histories", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_histories(histories: int) -> None:
    first = int(os.environ["AMPCOMPILE_TEST_SEED"]) % 10**6 * 1000
    for seed in range(first, first + histories):
        History(seed).run(14)
    gc.collect()
    assert ampcompile.weight_stats().bytes == 0
