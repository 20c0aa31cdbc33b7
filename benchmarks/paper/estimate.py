"""Write docs/gpu_estimate.md: estimated time of the counted work on an H200, by memory, products and launches.

The page states all assumptions. It is an estimate, and puts no figure beside a measured one.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.paper import results
from benchmarks.paper.cases import AMP, CONVERTED, STOCK

PAGE = results.ROOT / "docs" / "gpu_estimate.md"
BANDWIDTH = 0.9 * 4.8e12
"""Bytes a second: nine tenths of NVIDIA's figure for the H200."""
PRODUCTS = 0.65 * 989e12
"""Operations a second: a share of the dense bfloat16 peak that NVIDIA states."""
LAUNCH = 3e-6
"""Seconds that the host takes for a launch or a library call."""
PRODUCT_NAMES = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "scaled_dot_product", "linear")
HEAD = """# Estimate: what the counts may mean in time

Nothing here was measured. [The counts](gpu_paper.md) are divided by what an H200 can do: memory at 90 % of 4.8 TB/s,
products at 65 % of 989 TFLOP/s (both peaks are NVIDIA's; FlashAttention-3 reports 75 % of the second for attention,
[arXiv 2407.08608](https://arxiv.org/abs/2407.08608), and small products reach far less). A product takes what its bytes
or its operations take, whichever is more; all other kernels what their bytes take. "Launching" is what the host needs
at 3 µs for each kernel: where that is more than the device's time, as at 16 tokens, a step takes that long unless it is
captured in a CUDA graph. What caches save, how well each kernel uses the memory, and what overlaps isn't known.
"""


def write() -> None:
    """Write the page from the stored counts."""
    PAGE.write_text("\n".join([HEAD, *_rows()]) + "\n")


def device_seconds(graphs: list[dict[str, Any]]) -> float:
    """Seconds of the device for a whole step."""
    products = other = flops = 0.0
    for graph in graphs:
        flops += graph["flops"]
        for label, _, size in graph["parts"]:
            if any(name in label for name in PRODUCT_NAMES):
                products += size
            else:
                other += size
    return other / BANDWIDTH + max(products / BANDWIDTH, flops / PRODUCTS)


def launch_seconds(graphs: list[dict[str, Any]]) -> float:
    """Seconds of the host to launch a whole step."""
    return LAUNCH * sum(graph["launches"] + sum(graph["calls"].values()) for graph in graphs)


def _rows() -> Iterator[str]:
    peers = (STOCK, CONVERTED, AMP)
    yield f"| ms | {' | '.join(f'{peer}: device | launching' for peer in peers)} | {STOCK} / {AMP} |"
    yield f"|---|{'--:|' * (2 * len(peers) + 1)}"
    for case, counted in results.read().items():
        if all(peer in counted for peer in peers):
            times = [(device_seconds(g), launch_seconds(g)) for g in (counted[peer]["graphs"] for peer in peers)]
            cells = [f"{device * 1e3:.2f} | {launch * 1e3:.2f}" for device, launch in times]
            yield f"| {case} | {' | '.join(cells)} | {max(times[0]) / max(times[-1]):.2f} |"
