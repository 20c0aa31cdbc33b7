"""PTX and machine code of one kernel, launched on the same memory: all bytes that they leave must be equal."""

from typing import Any, ClassVar

import numpy as np

from softgpu.floats import Array, u1
from softgpu.machine_code.parse import Code, disassembled, target_of
from softgpu.memory import FIRST, Global
from softgpu.ptx.launch import Launcher, loaded
from softgpu.ptx.parse import Kernel
from softgpu.threads import Launch

texts: dict[Kernel, str] = {}
codes: dict[Kernel, Code] = {}


def assembled(kernel: Kernel) -> Code:
    """A kernel's machine code, parsed; what else was loaded for the same GPU is disassembled with it."""
    if kernel not in codes:
        if kernel not in texts:
            new = [each for each in loaded if each not in texts and target_of(each) == target_of(kernel)]
            texts.update(zip(new, disassembled(new), strict=True))
        codes[kernel] = Code(texts[kernel], kernel)
    return codes[kernel]


class Differs(AssertionError):
    """Machine code writes other bytes than its PTX."""


class Both(Launcher):
    """Launches the PTX, then the machine code on what was there before. Names of the kernels are in `compared`."""

    compared: ClassVar[set[str]] = set()

    def run(self, kernel: Kernel, grid: Any, values: list[bytes], memory: Global) -> Launch:
        before = contents(memory)
        launch = Launch(kernel, grid, values, memory, self.metadata.shared)
        expected = contents(memory)
        for at, data in before.items():
            block(memory, at)[:] = data
        again = Global(memory.sizes.items(), races=False)
        Launch(assembled(kernel), grid, values, again, self.metadata.shared)
        for at, data in expected.items():
            found = block(memory, at)
            wrong = np.flatnonzero(found != data)
            found[:] = data
            if len(wrong):
                raise Differs(
                    f"{kernel.name}: machine code wrote {len(wrong)} other bytes of a block of {len(data)} than its "
                    f"PTX, the first at {wrong[0]}. Look for an instruction whose row is wrong; else it is ptxas"
                )
        self.compared.add(kernel.name)
        return launch


def block(memory: Global, at: int) -> Array:
    return memory.view(u1)[at - FIRST : at - FIRST + memory.sizes[at]]


def contents(memory: Global) -> dict[int, Array]:
    return {at: block(memory, at).copy() for at in memory.sizes}
