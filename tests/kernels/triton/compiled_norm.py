"""Run by test_families.py: compiles the norms for a GPU that need not be there, and reads the result."""

from itertools import product

from ampcompile.kernels.triton import norm, norm_backward
from tests.kernels.triton.compiling import PINNED, compiled

LOW, HIGH = "*bf16", "*fp32"


def sizes(tile: norm.Tile) -> dict[str, int]:
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "WHOLE": tile.whole}


def check(capability: int) -> None:
    for width, of_h in product((768, 4096, 8192, 16384), (LOW, HIGH)):
        tile = norm.tile_of(width)
        code = compiled(
            norm.amp_norm,
            {
                **{"x": of_h, "residual": LOW, "weight": HIGH, "bias": HIGH, "h": of_h, "wide": HIGH, "low": LOW},
                **{"means": HIGH, "rstds": HIGH, "rows": "i32", "width": "i32", "eps": "fp32"},
            },
            {
                **dict.fromkeys(("HAS_RESIDUAL", "HAS_WEIGHT", "HAS_BIAS", "CENTERED", "HAS_LOW"), True),
                **{"INNER": False, "HAS_WIDE": False, **sizes(tile)},
            },
            capability,
            tile.warps,
            multiples_of_16=("width",),
        )
        reads = 1 if tile.whole else 2
        assert code.stack == 0 and code.registers <= (64 if PINNED else 80)
        assert code.count("ld.global*.v4.") >= 2 * reads + 2 and code.count("ld.global*.v2.") == 0
        assert code.count("st.global*.v4.") >= 2 and code.count("st.global*.v2.") == 0
        tile = norm.tile_of(width, 2)
        code = compiled(
            norm_backward.amp_norm_backward,
            {
                **{"g0": LOW, "g1": LOW, "g2": LOW, "g3": LOW, "grad_sum": of_h, "h": of_h, "weight": HIGH},
                **{"means": HIGH, "rstds": HIGH, "first": of_h, "second": LOW, "to_weight": HIGH, "to_bias": HIGH},
                **{"rows": "i32", "width": "i32"},
            },
            {
                **dict.fromkeys(("HAS_SUM", "HAS_WEIGHT", "TO_WEIGHT", "TO_BIAS", "CENTERED"), True),
                **{"COUNT": 3, "HAS_SECOND": of_h == HIGH, "INNER": False, **sizes(tile)},
            },
            capability,
            tile.warps,
            multiples_of_16=("width",),
        )
        reads = 1 if tile.whole else 2
        assert code.stack == 0 and code.registers <= (128 if PINNED else 136)
        assert code.count("ld.global*.v4.") >= 4 * reads + 2 and code.count("ld.global*.v2.") == 0
        assert code.count("st.global*.v4.") >= 3 and code.count("st.global*.v2.") == 0
