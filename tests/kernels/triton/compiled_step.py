"""Run by test_step.py: compiles the scaler's kernels for a GPU that need not be there, and reads the result.

What it asserts: 16-byte accesses in the hot loop, no spilled register in it, no barrier in the update kernels.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ampcompile.kernels.triton import adam, check_grads, sgd, unscale, update_scale

CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
TABLES = {"words": "*i64", "chunks": "*i32", "tensor_count": "i32"}
FLAGS = {"multiplier": "*fp32", "found_inf": "*fp32"}


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


def check(capability: int) -> None:
    for grad in (tl.float32, tl.float16, tl.bfloat16):
        wide = int(grad == tl.float32)  # gradients of 16 bits are read 8 bytes at a time beside float32 state
        for copy in (tl.float32, tl.float16, tl.bfloat16):
            both = {"GRAD": grad, "COPY": copy, "HAS_FOUND_INF": True, "CHUNK": 8192, "BLOCK": 512}
            for amsgrad in (False, True):
                code = compiled(
                    adam.adam_kernel,
                    {**TABLES, "scalars": "*fp32", "found_inf": "*fp32"},
                    {**both, "AMSGRAD": amsgrad},
                    capability,
                )
                assert code.count("ld.global*.v4.") == 3 + amsgrad + wide
                assert code.count("ld.global*.v2.") == 1 - wide
                assert code.count("st.global*.v4.") == 3 + amsgrad
                assert code.count("st.global*.v2.") == (copy != tl.float32)  # four 16-bit numbers
                assert code.count("bar.sync") == code.stack == 0 and code.registers <= 64
                # Division and square root are those of IEEE, as on the CPU.
                assert code.count("div.full") == code.count("sqrt.approx") == code.count("div.approx") == 0
                assert (code.count("cvt.rn.bf16") > 0) == (copy == tl.bfloat16)
            for momentum in (False, True):
                code = compiled(
                    sgd.sgd_kernel,
                    {**TABLES, **FLAGS},
                    {**both, "MOMENTUM": momentum, "HAS_MULTIPLIER": True},
                    capability,
                )
                assert code.count("ld.global*.v4.") == 1 + momentum + wide
                assert code.count("st.global*.v4.") == 1 + momentum
                assert code.count("bar.sync") == code.stack == 0 and code.registers <= 64
        blocks = {"GRAD": grad, "CHUNK": 8192, "BLOCK": 1024}
        code = compiled(unscale.unscale_kernel, {**TABLES, **FLAGS}, blocks, capability)
        assert code.count("ld.global*.v4.") > 0 and code.count("st.global*.v4.") > 0 and code.stack == 0
        for widen in (False, True):
            code = compiled(
                check_grads.check_kernel,
                {
                    **TABLES,
                    **dict.fromkeys(("chunk_count", "first_program", "all_programs"), "i32"),
                    **dict.fromkeys(("scale", "multiplier", "result"), "*fp32"),
                    **{"max_norm": "fp32", "sums": "*fp64", "flags": "*i32", "counter": "*i32"},
                },
                {
                    **dict.fromkeys(("HAS_SCALE", "HAS_MULTIPLIER", "HAS_MAX_NORM"), True),
                    **{**blocks, "PARTS": 1024, "WIDEN": widen},
                },
                capability,
            )
            # Assemblers (that of Triton 3.6 for Blackwell, that of 3.7 for Hopper) keep a float64 sum or two in memory
            # between chunks, outside the hot loop.
            spilled = 16 if widen else 8 if capability >= 100 and triton.__version__.startswith("3.6.") else 0
            assert code.count("ld.global*.v4.") > 0 and code.stack <= spilled
            assert code.count("atom*.acq_rel*.add") == 1
            assert (code.count("st.global*.v4.") > 0) == widen
    prepare = compiled(
        adam.prepare_kernel,
        {"words": "*i64", "scalars": "*fp32", "tensor_count": "i32", **FLAGS},
        {"HAS_MULTIPLIER": True, "HAS_FOUND_INF": True, "BLOCK": 128},
        capability,
    )
    update = compiled(
        update_scale.update_scale_kernel,
        {
            **{"scale": "*fp32", "growth_tracker": "*i32", "skips": "*i32", "found_inf": "*fp32", "interval": "i32"},
            **dict.fromkeys(("growth", "backoff", "low", "high"), "i64"),
        },
        {},
        capability,
        warps=1,
    )
    assert prepare.stack == update.stack == 0


if __name__ == "__main__":
    check(int(sys.argv[1]))
