"""Compiles the kernels that quantize weights for a GPU that need not be there."""

import itertools

import triton
import triton.language as tl

from ampcompile.kernels.triton import quantize_many
from tests.kernels.triton.compiling import compiled


def check(capability: int) -> None:
    if capability < 90:
        return  # no units for these types, and no conversion to them
    for source, by_rows in itertools.product((tl.float32, tl.bfloat16), (False, True)):
        types = {"FROM": source, "TILE": quantize_many.TILE, "COLUMNS": quantize_many.COLUMNS, "BY_ROWS": by_rows}
        addresses = {"words": "*i64", "tiles": "*i32"}
        code = compiled(quantize_many.amp_magnitudes, addresses, types, capability)
        assert code.stack == 0 and code.count("atom.*max") + code.count("red.*max") > 0
        code = compiled(quantize_many.amp_quantize, addresses, types, capability)
        assert code.count("cvt.rn.satfinite.e4m3x2") > 0, "two numbers at a time"
        if not by_rows:
            assert code.count("st.global*.v4.") == 4 and code.count("ld.global*.v4.") == 2, "16 bytes at a time"
            # Triton 3.6 takes some more: six programs fit at once where eight do.
            registers, tiles = (80, 2) if triton.__version__ < "3.7" else (64, 1)
            assert code.registers <= registers and code.shared <= tiles * quantize_many.TILE**2
        assert code.stack == 0 and code.shared <= 4 * quantize_many.TILE**2 * 2
