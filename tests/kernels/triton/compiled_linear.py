"""Run by test_families.py: compiles the product with a weight rounded on the way for a GPU that need not be there."""

import re

import triton.language as tl

from ampcompile.kernels.linear_cast import ROWS_FEW, ROWS_SHARED
from ampcompile.kernels.triton import linear_cast as gpu
from tests.kernels.triton.compiling import compiled
from tests.pairs import pairs

STAGE = "cp.async.cg.shared.global"
PRODUCT = {80: "mma.sync.aligned.m16n8k16", 90: "wgmma.mma_async.sync.aligned.m64n128k16", 100: "tcgen05.mma"}


def check(capability: int) -> None:
    assert gpu.FEW.rows == ROWS_FEW and gpu.STRIP * gpu.MANY.rows == ROWS_SHARED, "what bytes are counted by"
    # The last: the weight itself; or transposed, for the gradient of x.
    for tile, low, straight in pairs([gpu.FEW, gpu.MANY], [tl.float16, tl.bfloat16], [True, False]):
        pointers = {"x": f"*{low}", "out": f"*{low}", "weight": "*fp32", "bias": "*fp32"}
        strides = {"x_row", "weight_feature" if straight else "weight_depth", "features", "depth"}
        code = compiled(
            gpu.amp_linear_cast,
            {**pointers, **dict.fromkeys(strides, "i32"), "rows": "i32"},
            {
                **{"x_depth": 1, "weight_depth" if straight else "weight_feature": 1, "HAS_BIAS": True},
                **{"ROWS": tile.rows, "FEATURES": tile.features, "DEPTH": tile.depth, "STRIP": gpu.STRIP},
            },
            capability,
            tile.warps,
            tile.stages,
            multiples_of_16=strides,
        )
        assert code.stack == 0
        assert code.shared <= 82 * 1024, "an A100's processor holds two programs"
        sizes = re.findall(re.escape(STAGE) + r"[^;]*?, (0x[0-9a-f]+),", code.ptx)
        assert sizes and set(sizes) == {"0x10"}, "operands arrive 16 bytes at a time, past the registers"
        product = PRODUCT[capability] if tile is gpu.MANY else PRODUCT[80]
        assert code.count(product) > 0
        assert code.count(f"cvt.rn.{'bf16' if low == tl.bfloat16 else 'f16'}x2.f32") > 0
        wide = "st.global*.v4." if tile is gpu.MANY else "st.global*.v2."
        assert code.count("st.global") == code.count(wide) > 0
