"""Shares of the bandwidth and the arithmetic measured in the same run that kernels and calls reach; a roofline."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.peers import AMP, BASELINE, LIMIT
from benchmarks.records import Records, Row, spread
from benchmarks.report.ink import COLOURS, TEXT, family, picture


def rate(row: Row, figure: str) -> float:
    """Bytes or flops a second."""
    return row.figures[figure] / spread(row.figures["seconds"]).middle


@dataclass(frozen=True)
class Limits:
    """The rates that a copy and a matrix product reached."""

    bandwidth: float
    """Bytes a second, read and written."""
    products: dict[str, float]
    """Flops a second, by dtype."""

    def share(self, row: Row) -> str:
        """The bandwidth that a row reached of a copy's, counting the bytes that it must move; else nothing."""
        return f"{100 * rate(row, 'bytes') / self.bandwidth:.0f} %" if "bytes" in row.figures else ""

    def __str__(self) -> str:
        products = (f"{most / 1e9:.0f} Gflop/s in {dtype}" for dtype, most in self.products.items())
        return (
            f"A copy moves {self.bandwidth / 1e9:.1f} GB/s; matrix products reach {' and '.join(products)}. "
            "What is written over its own input can go beyond the copy, which on a CPU also fetches what it overwrites."
        )


def measured_limits(records: Records) -> Limits | None:
    """The limits that a run measured, if it did."""
    alone = {case: rows["torch"] for case, rows in records.cases("kernels").items() if "torch" in rows}
    if "copy" not in alone:
        return None
    products = {case.split(", ")[1]: row for case, row in alone.items() if case.startswith("matrix product")}
    return Limits(rate(alone["copy"], "bytes"), {dtype: rate(row, "flops") for dtype, row in products.items()})


class Point(NamedTuple):
    """Something that computes: flops for each byte it must move, and flops a second."""

    what: str
    peer: str
    intensity: float
    speed: float


def points(records: Records) -> Iterator[Point]:
    """Kernels, and GPTs in inference, which must read each weight once in the low type."""
    for case, rows in records.cases("kernels").items():
        for peer, row in rows.items():
            if not row.why and peer != "torch":
                yield Point(case, peer, row.figures["flops"] / row.figures["bytes"], rate(row, "flops"))
    for case, rows in records.cases("inference").items():
        for peer in (AMP, BASELINE, LIMIT):
            if (shape := re.search(r"(\d+)x(\d+)", case)) and peer in rows and not rows[peer].why:
                tokens = int(shape[1]) * int(shape[2])
                seconds = spread(rows[peer].figures["seconds"]).middle
                yield Point(case, peer, tokens, 2 * tokens * rows[peer].figures["parameters"] / seconds)


def draw_roofline(records: Records, stage: str, path: Path) -> bool:
    """Flops a second over flops a byte, for the bytes that must be moved. False without measured limits."""
    limits = measured_limits(records)
    if limits is None:
        return False
    found = list(points(records))
    kinds = dict(zip(dict.fromkeys(point.what for point in found), cycle("osD^vP*Xhd<>"), strict=False))
    peers = dict.fromkeys(family(point.peer) for point in found)
    with picture(path, 1, 9, 5.5) as (figure, (axes,)):
        intensity = np.geomspace(0.05, 5000, 200)
        for dtype, most in limits.products.items():
            axes.plot(intensity, np.minimum(intensity * limits.bandwidth, most) / 1e9, color=TEXT, linewidth=1)
            axes.annotate(f"matrix product, {dtype}", (5000, 1.1 * most / 1e9), color=TEXT, ha="right")
        axes.annotate("copy", (0.05, 0.08 * limits.bandwidth / 1e9), color=TEXT)
        for what, peer, x, y in found:
            axes.plot(x, y / 1e9, linestyle="none", color=COLOURS[family(peer)], marker=kinds[what])
        for what, marker in kinds.items():
            axes.plot([], [], linestyle="none", color=TEXT, marker=marker, label=what)
        for peer in peers:
            axes.plot([], [], color=COLOURS[peer], label=peer)
        axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="Gflop/s")
        figure.legend(loc="outside lower center", ncols=3)
    return True
