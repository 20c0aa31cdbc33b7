"""A report as text that fits a terminal: repeated layers are one row, reasons are footnotes."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ampcompile.dtypes import short_name
from ampcompile.records.casts import CastRecord, GraphRecord, OpRecord
from ampcompile.records.totals import Total


def render(
    graphs: Sequence[GraphRecord], unknown: Sequence[str], totals: Sequence[Total], width: int | None = None
) -> str:
    """The table of all graphs, at most `width` columns wide (default: the terminal's)."""
    console = Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((120, 24)).columns,
        highlight=False,
        color_system=None,
    )
    reasons = _Footnotes()
    for index, graph in enumerate(graphs):
        console.print(_headline(index, len(graphs), graph), markup=False)
        if graph.casts:
            console.print(_cast_table(graph.casts, reasons))
        console.print(_op_table(graph.ops, reasons))
        if graph.reason:
            console.print(f"graph break after graph {index}: {graph.reason.splitlines()[0]}", markup=False)
        console.print()
    for text, number in reasons.numbers.items():
        console.print(f"[{number}] {text}", markup=False)
    if unknown:
        console.print(
            f"unknown to the policy: {', '.join(unknown)} (ampcompile.register_op gives a rule)", markup=False
        )
    if totals:
        console.print()
        console.print(_total_table(totals))
    console.print(_summary(graphs), markup=False)
    for graph in graphs:
        if graph.estimate is not None and graph.estimate.products:
            console.print(str(graph.estimate), markup=False)
    if any(graph.fusions for graph in graphs):
        console.print(_fused(graphs), markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


class _Footnotes:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return str(self.numbers.setdefault(text, len(self.numbers) + 1)) if text else ""


def human_bytes(count: int) -> str:
    """`1.5 MiB`, `640 B`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _headline(index: int, count: int, graph: GraphRecord) -> str:
    return f"graph {index} of {count}: {graph.precision}, {len(graph.ops)} ops, {len(graph.casts)} casts"


def _layers(path: str) -> str:
    """`blocks.3.mlp` as `blocks.*.mlp`: rows of repeated layers are merged."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _short_source(source: str) -> str:
    return os.path.basename(source)


def _merged(rows: Iterable[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int, int]]:
    """(row, how many times, bytes of all), in the order of first appearance."""
    counts: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    for row, size in rows:
        counts[row] += 1
        sizes[row] += size
    return [(row, counts[row], sizes[row]) for row in counts]


def _cast_table(casts: Sequence[CastRecord], reasons: _Footnotes) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 1, 0, 0))
    for heading in ("cast for", "module", "line", "of", "dtypes", "shape", "fate"):
        table.add_column(heading, overflow="fold")
    for heading in ("times", "bytes", "why"):
        table.add_column(heading, justify="right", overflow="fold")
    rows = (
        (
            (
                c.op,
                _layers(c.module),
                _short_source(c.source),
                c.of,
                f"{short_name(c.dtype_from)}>{short_name(c.dtype_to)}",
                "x".join(map(str, c.shape)) or "scalar",
                "+".join(c.fate[1:]) or c.fate[0],
                c.because,
            ),
            c.bytes,
        )
        for c in casts
    )
    for row, count, size in _merged(rows):
        table.add_row(*row[:-1], str(count), human_bytes(size), reasons(row[-1]))
    return table


def _op_table(ops: Sequence[OpRecord], reasons: _Footnotes) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 1, 0, 0))
    table.add_column("op", overflow="fold")
    table.add_column("dtype")
    table.add_column("times", justify="right")
    table.add_column("why", justify="right")
    rows = (((op.op, short_name(op.dtype) if op.dtype else "", op.because), 0) for op in ops)
    for row, count, _ in sorted(_merged(rows)):
        table.add_row(*row[:-1], str(count), reasons(row[-1]))
    return table


def _total_table(totals: Sequence[Total]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 1, 0, 0))
    table.add_column("conversions between floating dtypes in one call", overflow="fold")
    table.add_column("times", justify="right")
    table.add_column("bytes", justify="right")
    for total in totals:
        table.add_row(total.stage, str(total.casts), human_bytes(total.bytes))
    return table


def _summary(graphs: Sequence[GraphRecord]) -> str:
    casts = [cast for graph in graphs for cast in graph.casts]
    every_call = [cast for cast in casts if cast.runs]
    return (
        f"{len(casts)} casts inserted, {human_bytes(sum(c.bytes for c in casts))}; "
        f"{len(every_call)} of them run as casts in every call, {human_bytes(sum(c.bytes for c in every_call))}"
    )


def _fused(graphs: Sequence[GraphRecord]) -> str:
    fusions = [fusion for graph in graphs for fusion in graph.fusions]
    families = ", ".join(f"{count} {family}" for family, count in Counter(f.family for f in fusions).items())
    saved, freed = (human_bytes(sum(sizes)) for sizes in zip(*((f.saved, f.freed) for f in fusions), strict=True))
    return f"fused: {families}; by count {saved} less moved in one call, {freed} less held"
