"""Compiles the kernels on rows of logits for a GPU that need not be there."""

from ampcompile.kernels.triton import cross_entropy as gpu
from tests.kernels.triton.compiling import compiled

SIZES = {"stride": "i32", "width": "i32"}  # of any value: a row of 50257 begins anywhere
OF_ROWS = ("lse", "probability", "hit", "smoothing")


def check(capability: int) -> None:
    for low in ("fp16", "bf16"):
        logits = {"logits": f"*{low}", "weight": "*fp32", **SIZES}
        for weighted, has_weight in ((False, False), (True, False), (True, True)):
            code = compiled(
                gpu.amp_cross_entropy_sums,
                {**logits, "lse": "*fp32", "sums": "*fp32"},
                {"WEIGHTED": weighted, "HAS_WEIGHT": has_weight, "BLOCK": gpu.BLOCK},
                capability,
                gpu.WARPS,
            )
            # 16 numbers a thread, in the loop over whole blocks.
            assert code.count("ld.global*.v4.") == 2 and code.stack == 0 and code.registers <= 64
            code = compiled(
                gpu.amp_cross_entropy_gradient,
                {**logits, "target": "*i64", "lse_stride": "i32", **dict.fromkeys(OF_ROWS, "*fp32")},
                {"SMOOTH": weighted, "HAS_WEIGHT": has_weight, "BLOCK": gpu.BLOCK},
                capability,
                gpu.WARPS,
            )
            assert code.count("ld.global*.v4.") == code.count("st.global*.v4.") == 2
            assert code.stack == 0 and code.registers <= 128 and code.count("bar.sync") == 0
