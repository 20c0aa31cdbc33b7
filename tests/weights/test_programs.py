"""Random programs of weights, aliases, writers and backwards give what casting at every call gives."""

import gc
import os

import pytest
import torch

import ampcompile
from tests.weights import programs as random_programs


@pytest.mark.parametrize(
    ("lower", "programs"),
    [
        ("aot_eager", 100),
        ("eager", 100),
        pytest.param("inductor", 10, marks=pytest.mark.ci),
        pytest.param("aot_eager", 5000, marks=pytest.mark.slow),
    ],
)
def test_programs(lower: str, programs: int) -> None:
    first = int(os.environ["AMPCOMPILE_TEST_SEED"]) % 10**6
    with torch._dynamo.config.patch(recompile_limit=200):
        compiled = dict(random_programs.compiled(lower))
        for seed in range(first, first + programs):
            random_programs.Program(seed, compiled).run(14)
    gc.collect()
    assert ampcompile.weight_stats().bytes == 0
