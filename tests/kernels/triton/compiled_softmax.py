"""Run by test_families.py: compiles the softmax for a GPU that need not be there, and reads the result."""

from itertools import product

from ampcompile.kernels.triton import softmax as gpu
from ampcompile.kernels.triton.norm import tile_of
from tests.kernels.triton.compiling import compiled

LOW, HIGH = "*bf16", "*fp32"
SIZES = dict.fromkeys(("rows", "width", "size_1", "size_2", "stride_0", "stride_1", "stride_2"), "i32")
OTHERS = {"maxima": HIGH, "totals": HIGH, "scale": "fp32", "fill": "fp32", **SIZES}
MASKS = {gpu.NONE: LOW, gpu.ADDED: LOW, gpu.KEPT: "*i1"}


def check(capability: int) -> None:
    for width, kind, of_x in product((512, 2048, 8192, 16384), MASKS, (LOW, HIGH)):
        tile = tile_of(width)
        constants = {
            **{"MASK": kind, "SCALED_LOW": of_x == LOW, "MASKED_LOW": False, "stride_3": 1},
            **{"ROWS": tile.rows, "COLUMNS": tile.columns, "WHOLE": tile.whole},
        }
        for kernel, reads in ((gpu.forward_kernel, 1), (gpu.backward_kernel, 2)):
            types = {"x": of_x, "mask": MASKS[kind], "out": of_x if reads == 2 else LOW, "grad": LOW, **OTHERS}
            types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            strides = ("width", "stride_0", "stride_1", "stride_2")
            code = compiled(kernel, types, constants, capability, tile.warps, multiples_of_16=strides)
            assert code.stack == 0 and code.registers <= 128
            assert code.count("ld.global*.v4.") >= reads * (1 if tile.whole else 2) + (kind == gpu.ADDED)
            assert code.count("st.global*.v4.") >= 1
