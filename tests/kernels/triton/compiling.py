"""Compiles kernels for a GPU that need not be there, and reads the result."""

import os
import re
import subprocess
import tempfile
from collections.abc import Collection
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


class Code(NamedTuple):
    """What the tests look at: PTX, registers and spilled bytes a thread, shared memory a program (bytes)."""

    ptx: str
    registers: int
    stack: int
    shared: int

    def count(self, instruction: str) -> int:
        """How often an instruction occurs; `*` stands for any qualifiers."""
        return len(re.findall(re.escape(instruction).replace(r"\*", r"[\w.:]*"), self.ptx))


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    warps: int = 4,
    stages: int = 3,
    multiples_of_16: Collection[str] = (),
) -> Code:
    names = kernel.arg_names
    # All addresses are, as torch allocates.
    divisible = [i for i, n in enumerate(names) if n in multiples_of_16 or types.get(n, "").startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Code(binary.asm["ptx"], int(registers), int(stack), binary.metadata.shared)
