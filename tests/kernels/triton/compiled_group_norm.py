"""Run by test_families.py: compiles group norm for a GPU that need not be there, and reads the result."""

from itertools import product

import torch

from ampcompile.kernels.triton import group_norm, group_norm_backward
from tests.kernels.triton.compiling import PINNED, compiled

LOW, HIGH = "*bf16", "*fp32"
# Channels and places of a group as UNets have them, from the widest places to one.
SHAPES = [(10, 64 * 64), (20, 32 * 32), (40, 8 * 8)]


def check(capability: int) -> None:
    for (channels, places), of_h in product(SHAPES, (LOW, HIGH)):
        row = group_norm.row_of(torch.empty(1, 2 * channels, places), 2)
        sizes = {"CHANNELS": row.channels_tile, "PLACES": row.places_tile}
        numbers = {"groups": "i32", "per_group": "i32", "places": "i32"}
        code = compiled(
            group_norm.amp_group_norm,
            {
                **{"x": of_h, "residual": LOW, "weight": HIGH, "bias": HIGH, "h": of_h, "wide": HIGH, "low": LOW},
                **{"means": HIGH, "rstds": HIGH, "eps": "fp32", **numbers},
            },
            {
                **dict.fromkeys(("HAS_RESIDUAL", "HAS_WEIGHT", "HAS_BIAS", "SILU", "HAS_LOW"), True),
                **{"INNER": False, "HAS_WIDE": False, **sizes},
            },
            capability,
            row.warps,
            multiples_of_16=("places",),
        )
        assert code.stack == 0 and code.registers <= (64 if PINNED else 80)
        assert code.count("ld.global*.v4.") >= 4 and code.count("ld.global*.v2.") == 0
        assert code.count("st.global*.v4.") >= 2 and code.count("st.global*.v2.") == 0
        code = compiled(
            group_norm_backward.amp_group_norm_backward,
            {
                **{"g0": LOW, "g1": LOW, "g2": LOW, "g3": LOW, "grad_sum": of_h, "h": of_h, "weight": HIGH},
                **{"bias": HIGH, "means": HIGH, "rstds": HIGH, "first": of_h, "second": LOW},
                **{"to_weight": HIGH, "to_bias": HIGH, **numbers},
            },
            {
                **dict.fromkeys(("HAS_SUM", "HAS_WEIGHT", "HAS_BIAS", "SILU", "TO_WEIGHT", "TO_BIAS"), True),
                **{"COUNT": 2, "HAS_SECOND": of_h == HIGH, "INNER": False, **sizes},
            },
            capability,
            row.warps,
            multiples_of_16=("places",),
        )
        # Triton 3.9 for sm_80 puts 8 bytes aside and takes 48 registers instead of 58: one more program a processor.
        assert code.stack <= (0 if PINNED else 8) and code.registers <= (64 if PINNED else 80)
        assert code.count("ld.global*.v4.") >= 7 and code.count("ld.global*.v2.") == 0
        assert code.count("st.global*.v4.") >= 1 and code.count("st.global*.v2.") == 0
