"""Compiles the kernels that cast weights for a GPU that need not be there."""

import re

import torch
import triton.language as tl

from ampcompile.kernels.triton import cast_many
from tests.kernels.triton.compiling import compiled

WIDE = {torch.float64: "ld.global.v2.b64", torch.float32: "ld.global.v4.b32"}


def check(capability: int) -> None:
    for source, instruction in WIDE.items():
        for target in (tl.float16, tl.bfloat16):
            types = {
                "FROM": cast_many.TYPES[source],
                "TO": target,
                "CHUNK": 8192,
                "BLOCK": cast_many.BLOCK,
                "ROOM": 128,
            }
            code = compiled(cast_many.amp_cast, {"words": "*i64", "count": "i32"}, types, capability)
            assert code.count(instruction) >= 2, "sixteen bytes at a time, two loads under way"
            hot = re.search(re.escape(instruction) + r".*?st\.global\.v2\.b32", code.ptx, re.DOTALL)
            assert hot and "bar.sync" not in hot[0], "four numbers of 16 bits at a time, none from other threads"
            assert code.stack == 0 and code.registers <= 48
