"""Whose kernels a test runs: C++'s, or those of a generation of GPUs, by an emulator of PTX on CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from ampcompile.kernels import tables
from tests.scaler.cases import SIZES

OTHERS = (80, 100, "machine code")
"""Generations of GPUs beside 90, an H100's, by their numbers; machine code is that of sm_90, run beside its PTX."""
CHUNK = 2 * tables.SPAN


class Engine(NamedTuple):
    """`capability`: the generation's number, 0 of C++; `sizes`: numbers of elements around those of its chunks."""

    capability: int
    sizes: tuple[int, ...]

    def need_8_bits(self) -> None:
        if 0 < self.capability < 90:
            pytest.skip("before sm_90 kernels convert to no numbers of 8 bits")


@contextmanager
def running(on: Any) -> Iterator[Engine]:
    """A generation of `OTHERS`, 90, or 0 for C++."""
    if not on:
        yield Engine(0, SIZES)
        return
    pytest.importorskip("triton")
    from softgpu.machine_code.compare import Both
    from tests.kernels.triton.running import on_a_gpu

    both = on == "machine code"  # which has to leave the same bytes as PTX
    capability = 90 if both else on
    with on_a_gpu(capability, *([Both] if both else []), chunk=CHUNK):
        yield Engine(capability, (0, 1, tables.SPAN, tables.SPAN + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3))
