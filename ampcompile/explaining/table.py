"""Render a report as text that fits a terminal: repeated layers share a row, reasons are footnotes."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from rich.table import Table

from ampcompile.dtypes import short_name
from ampcompile.records.casts import CastRecord, FusionRecord, GraphRecord, OpRecord
from ampcompile.records.totals import EAGER_BACKWARD, EAGER_FORWARD, JOINT, Total
from ampcompile.sharding.weight import GatherRecord

from .text import human_bytes, table_of, text_of

if TYPE_CHECKING:
    from .eager_modules import EagerRecord
    from .report import Report


Footnotes = defaultdict[str, int]
"""Numbers of the reasons printed so far."""


def render(report: Report, width: int | None = None) -> str:
    """The tables of all graphs, at most `width` columns wide (default: the terminal's); what was gained comes first."""
    graphs, parts = report.graphs, list[str | Table]()
    reasons: Footnotes = defaultdict(count(1).__next__)
    parts += [gain(report), ""]
    for index, graph in enumerate(graphs):
        parts.append(_headline(index, len(graphs), graph))
        if graph.casts:
            parts.append(_cast_table(graph.casts, reasons))
        if not graph.left:
            parts.append(_op_table(graph.ops, reasons))
        if graph.reason:
            parts.append(f"graph break after graph {index}: {graph.reason}")
        parts.append("")
    parts += [f"graph break before a graph: {reason}" for reason in report.breaks]
    if report.eager:
        parts += [_eager_table(report.eager), ""]
    if report.results:
        parts += ["results of the call", _cast_table(report.results, reasons), ""]
    parts += [f"[{number}] {text}" for text, number in reasons.items()]
    if unknown := report.unknown_ops:
        parts.append(f"unknown to the policy: {', '.join(unknown)} (ampcompile.register_op gives a rule)")
    if report.totals:
        parts += ["", _total_table(report.changes)]
    parts.append(_summary(report.casts))
    if report.gathers:
        parts += ["", _gather_table(report.gathers)]
    several = len(graphs) > 1
    for index, graph in enumerate(graphs):
        if graph.estimate is not None and graph.estimate.products:
            parts.append(f"graph {index}: " * several + str(graph.estimate))
    if report.fusions:
        parts.append(_fusion_line(report.fusions))
    return text_of(parts, width)


def gain(report: Report) -> str:
    """The conversions of eager autocast beside those that are left, in one line; why there is nothing to compare."""
    totals = {total.stage: total for total in report.totals}
    if (forward := totals.get(EAGER_FORWARD)) is None or (backward := totals.get(EAGER_BACKWARD)) is None:
        return "every graph is left to autocast" if report.graphs else _without_graphs(report)
    ours, once = report.totals[-1], [cast for cast in report.casts if "hoisted" in cast.fate]
    weights = f", and {len(once)} of weights once per update, {human_bytes(sum(c.bytes for c in once))}" if once else ""
    theirs = f"{forward.casts} conversions in forward under eager autocast, {human_bytes(forward.bytes)}"
    if ours.stage.endswith(JOINT) and backward.casts:
        theirs = (
            f"{forward.casts + backward.casts} conversions a step under eager autocast (forward {forward.casts}, "
            f"backward {backward.casts}), {human_bytes(forward.bytes + backward.bytes)}"
        )
    return f"{theirs}; {ours.casts} here, {human_bytes(ours.bytes)}{weights}"


def _without_graphs(report: Report) -> str:
    nothing = "Dynamo made no graph: nothing is compiled"
    return nothing if report.breaks else f"{nothing}. torch._dynamo.reset() before this call may show why"


def _footnote(reason: str, reasons: Footnotes) -> str:
    return str(reasons[reason]) if reason else ""


def _headline(index: int, graphs: int, graph: GraphRecord) -> str:
    counts = f", {len(graph.ops)} ops, {len(graph.casts)} casts" if not graph.left else ""
    return f"graph {index} of {graphs}: {graph.precision}{counts}"


def _layers(path: str) -> str:
    """Replace numbers in a path, `blocks.3.mlp` by `blocks.*.mlp`, so that rows of repeated layers are merged."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _cast_table(casts: Sequence[CastRecord], reasons: Footnotes) -> Table:
    table = table_of(["cast for", "module", "line", "of", "dtypes", "shape", "fate"], ["times", "bytes", "why"])
    merged: dict[tuple[str, ...], list[CastRecord]] = {}
    for c in casts:
        fate = "+".join(c.fate[1:]) or c.fate[0]
        row = (c.op, _layers(c.module), os.path.basename(c.source), c.shown, c.dtypes, c.sizes, fate, c.because)
        merged.setdefault(row, []).append(c)
    for (op, layers, *rest, because), equal in merged.items():
        module = layers if len({c.module for c in equal}) > 1 else equal[0].module
        size = human_bytes(sum(c.bytes for c in equal))
        table.add_row(op, module, *rest, str(len(equal)), size, _footnote(because, reasons))
    return table


def _op_table(ops: Sequence[OpRecord], reasons: Footnotes) -> Table:
    table = table_of(["op", "dtype"], ["times", "why"])
    rows = Counter((op.op, short_name(op.dtype) if op.dtype else "", op.because) for op in ops)
    for (op, dtype, because), times in sorted(rows.items()):
        table.add_row(op, dtype, str(times), _footnote(because, reasons))
    return table


def _eager_table(modules: Sequence[EagerRecord]) -> Table:
    table = table_of(["runs eagerly, under autocast", "class", "line"], ["of the call's time"])
    for each in modules:
        table.add_row(each.module or "the callable", each.kind, os.path.basename(each.source), f"{each.share:.0%}")
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


def _fusion_line(fusions: Sequence[FusionRecord]) -> str:
    families = ", ".join(f"{times} {family}" for family, times in Counter(f.family for f in fusions).items())
    saved, freed = (human_bytes(sum(sizes)) for sizes in zip(*((f.saved, f.freed) for f in fusions), strict=True))
    return f"fused: {families}; by count {saved} less moved in one call, {freed} less held"
