"""The kernels of a CPU, and those of a GPU on CPU tensors: as Triton compiles them, their PTX run by an emulator."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.engines import OTHERS, Engine, running


@pytest.fixture(
    params=[0, *(pytest.param(on, marks=pytest.mark.ci if on == 90 else pytest.mark.slow) for on in (90, *OTHERS))],
    ids=str,
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The kernels by which the public functions compute in a test: C++'s (0), or those of a generation of GPUs."""
    with running(request.param) as engine:
        yield engine


@pytest.fixture(params=[90, *(pytest.param(on, marks=pytest.mark.slow) for on in OTHERS)], ids=str)
def on_a_gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same for what a GPU has alone."""
    with running(request.param) as engine:
        yield engine
