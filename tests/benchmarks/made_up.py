"""A result file with invented figures, for tests of what is made of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import AMP, BASELINE, LIMIT
from benchmarks.records import Records, Row

ABOUT: dict[str, Any] = {
    "device": "cpu",
    "processor": "Abacus 9000",
    "cores": 2,
    "threads": 2,
    "low-precision instructions": ["avx512_bf16"],
    "memory_bytes": 2**34,
    "system": "Linux x86_64",
    "python": "3.11.7",
    "compiler": "g++ 12",
    "packages": {"torch": "2.13.0", "liger-kernel": ""},
    "peers": {},
}


def rows(case: str, seconds: Mapping[str, Sequence[float]], **figures: Any) -> list[Row]:
    """A row for each peer, with the same further figures."""
    return [Row(case, peer, {"seconds": list(times), **figures}) for peer, times in seconds.items()]


def records(path: Path, amp: float = 1.0, drift: float = 1.0, **of_amp: Any) -> Records:
    """Results of every kind. `amp` stretches our times, `drift` everybody's; `of_amp` replaces figures of ours."""
    found = Records(path, ABOUT)
    around = [0.99 * drift, 1.0 * drift, 1.02 * drift, 1.01 * drift]

    def times(seconds: float) -> list[float]:
        return [seconds * factor for factor in around]

    def race(case: str, ours: float, **figures: Any) -> list[Row]:
        both = rows(case, {BASELINE: times(0.008), LIMIT: times(0.0041)}, **figures)
        return [*both, *rows(case, {AMP: times(ours * amp)}, **{**figures, **of_amp})]

    common = {"peak_bytes": 2**29, "casts": 7, "cast_bytes": 2**20, "error": 3e-3, "host_syncs": 0}
    limits = [
        *rows("copy", {"torch": times(0.02)}, bytes=10**9, flops=0),
        *rows("matrix product, float32", {"torch": times(0.1)}, bytes=10**7, flops=10**10),
    ]
    kernel = rows("AdamW", {AMP: times(0.02 * amp), "torch: fused": times(0.025)}, bytes=28 * 10**7, flops=16 * 10**7)
    job = {"minutes": 1.5, "commit": "abc1234", "load": 0.1}
    found.add("kernels", "limits", limits, **job)
    found.add("kernels", "step", [*kernel, Row("AdamW", "Liger-Kernel", why="needs a GPU")], **job)
    inference = race("GPT 23M, 1x16", 0.004, parameters=23_000_000, **common)
    missing = Row("GPT 23M, 1x16", "Thunder + autocast", why="lightning-thunder is not installed")
    found.add("inference", "GPT 23M, 1x16", [*inference, missing], **job)
    trained = race("GPT 23M, 4x128: step", 0.006, losses=[9.0, 8.5, 8.25], **common)
    found.add("training", "GPT 23M, 4x128", trained, **job)
    growing = [
        *race("GPT 1x512, 1x16", 0.002, parameters=3e6),
        *race("GPT 3x512, 1x16", 0.004, parameters=9e6),
        *(row for n in (10, 110) for row in race(f"{n} weights, 1x16", 0.0041 + 1e-5 + n * 1e-6)),
        *(Row(f"{n} nodes", AMP, {"nodes": n, "seconds": [n * 1e-4]}) for n in (1000, 4000)),
    ]
    found.add("growth", "growth", growing, **job)
    compiled = rows("GPT 23M, 4x128, cold start", {BASELINE: times(20.0), AMP: times(21.0 * amp)})
    found.add("compile", "GPT 23M, 4x128", compiled, **job)
    return found
