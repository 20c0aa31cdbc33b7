"""Random programs of weights, aliases, writers and backwards, and random histories of the table that copies are in."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

import ampcompile
from tests.weights.histories import History
from tests.weights.programs import Program, compiled


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert ampcompile.weight_stats().bytes == 0


def seeds(count: int, stride: int = 1) -> range:
    first = int(os.environ["AMPCOMPILE_TEST_SEED"]) % 10**6 * stride
    return range(first, first + count)


@pytest.mark.parametrize(
    ("lower", "programs"),
    [
        ("aot_eager", 50),
        ("eager", 50),
        pytest.param("inductor", 6, marks=pytest.mark.ci),
        pytest.param("aot_eager", 5000, marks=pytest.mark.slow),
    ],
)
def test_programs_give_what_casting_at_every_call_gives(lower: str, programs: int) -> None:
    with torch._dynamo.config.patch(recompile_limit=200):
        graphs = dict(compiled(lower))
        for seed in seeds(programs):
            Program(seed, graphs).run(14)


@pytest.mark.parametrize("histories", [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_histories_cast_what_they_must_and_nothing_more(histories: int) -> None:
    for seed in seeds(histories, 1000):
        History(seed).run(14)
