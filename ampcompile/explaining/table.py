"""Render a report as text that fits a terminal: repeated layers share a row, reasons are footnotes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from ampcompile.dtypes import short_name
from ampcompile.records.casts import CastRecord, GraphRecord, OpRecord
from ampcompile.records.totals import Total
from ampcompile.sharding.weight import GatherRecord

from .text import human_bytes, table_of, text_of


def render(
    graphs: Sequence[GraphRecord],
    unknown: Sequence[str],
    totals: Sequence[Total],
    results: Sequence[CastRecord] = (),
    gathers: Sequence[GatherRecord] = (),
    width: int | None = None,
) -> str:
    """The table of all graphs, at most `width` columns wide (default: the terminal's)."""
    reasons, parts = _Footnotes(), list[str | Table]()
    for index, graph in enumerate(graphs):
        parts.append(_headline(index, len(graphs), graph))
        if graph.casts:
            parts.append(_cast_table(graph.casts, reasons))
        if not graph.left:
            parts.append(_op_table(graph.ops, reasons))
        if graph.reason:
            parts.append(f"graph break after graph {index}: {graph.reason.splitlines()[0]}")
        parts.append("")
    if results:
        parts += ["results of the call", _cast_table(results, reasons), ""]
    parts += [f"[{number}] {text}" for text, number in reasons.numbers.items()]
    if unknown:
        parts.append(f"unknown to the policy: {', '.join(unknown)} (ampcompile.register_op gives a rule)")
    if totals:
        parts += ["", _total_table(totals)]
    parts.append(_summary([*(cast for graph in graphs for cast in graph.casts), *results]))
    if gathers:
        parts += ["", _gather_table(gathers)]
    parts += [str(graph.estimate) for graph in graphs if graph.estimate is not None and graph.estimate.products]
    if any(graph.fusions for graph in graphs):
        parts.append(_fusion_line(graphs))
    return text_of(parts, width)


class _Footnotes:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return str(self.numbers.setdefault(text, len(self.numbers) + 1)) if text else ""


def _headline(index: int, count: int, graph: GraphRecord) -> str:
    counts = f", {len(graph.ops)} ops, {len(graph.casts)} casts" if not graph.left else ""
    return f"graph {index} of {count}: {graph.precision}{counts}"


def _layers(path: str) -> str:
    """Replace numbers in a path, `blocks.3.mlp` by `blocks.*.mlp`, so that rows of repeated layers are merged."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _merge_rows(rows: Iterable[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int, int]]:
    """Merge equal rows: (row, count, total bytes), in the order of first appearance."""
    counts: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    for row, size in rows:
        counts[row] += 1
        sizes[row] += size
    return [(row, counts[row], sizes[row]) for row in counts]


def _cast_table(casts: Sequence[CastRecord], reasons: _Footnotes) -> Table:
    table = table_of(["cast for", "module", "line", "of", "dtypes", "shape", "fate"], ["times", "bytes", "why"])
    rows = (
        (
            (
                c.op,
                _layers(c.module),
                os.path.basename(c.source),
                c.of,
                c.dtypes,
                c.sizes,
                "+".join(c.fate[1:]) or c.fate[0],
                c.because,
            ),
            c.bytes,
        )
        for c in casts
    )
    for row, count, size in _merge_rows(rows):
        table.add_row(*row[:-1], str(count), human_bytes(size), reasons(row[-1]))
    return table


def _op_table(ops: Sequence[OpRecord], reasons: _Footnotes) -> Table:
    table = table_of(["op", "dtype"], ["times", "why"])
    rows = (((op.op, short_name(op.dtype) if op.dtype else "", op.because), 0) for op in ops)
    for row, count, _ in sorted(_merge_rows(rows)):
        table.add_row(*row[:-1], str(count), reasons(row[-1]))
    return table


def _total_table(totals: Sequence[Total]) -> Table:
    table = table_of(["conversions between floating dtypes in one call"], ["times", "bytes"])
    for total in totals:
        table.add_row(total.stage, str(total.casts), human_bytes(total.bytes))
    return table


def _gather_table(gathers: Sequence[GatherRecord]) -> Table:
    table = table_of(["weight", "gathered as", "because"], ["bytes saved"])
    for gather in gathers:
        table.add_row(gather.weight, gather.gathered_as, gather.because, human_bytes(gather.bytes_saved))
    return table


def _summary(casts: Sequence[CastRecord]) -> str:
    every_call = [cast for cast in casts if cast.runs]
    return (
        f"{len(casts)} casts inserted, {human_bytes(sum(c.bytes for c in casts))}; "
        f"{len(every_call)} of them run as casts in every call, {human_bytes(sum(c.bytes for c in every_call))}"
    )


def _fusion_line(graphs: Sequence[GraphRecord]) -> str:
    fusions = [fusion for graph in graphs for fusion in graph.fusions]
    families = ", ".join(f"{count} {family}" for family, count in Counter(f.family for f in fusions).items())
    saved, freed = (human_bytes(sum(sizes)) for sizes in zip(*((f.saved, f.freed) for f in fusions), strict=True))
    return f"fused: {families}; by count {saved} less moved in one call, {freed} less held"
