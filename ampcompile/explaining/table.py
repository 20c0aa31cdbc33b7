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
from ampcompile.records.casts import PER_UPDATE, CastRecord, FusionRecord, GraphRecord, OpRecord
from ampcompile.records.totals import JointCast, Total
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
    if report.balance:
        parts += [_balance_table(report.balance), ""]
    for index, graph in enumerate(graphs):
        parts.append(_headline(index, len(graphs), graph))
        if graph.casts or graph.backward_casts:
            parts.append(_cast_table(graph.casts, reasons, graph.backward_casts))
        if not graph.left:
            parts.append(_op_table(graph.ops, reasons))
        if words := widened(graph, report.advice):
            parts.append(words)
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
    if report.gathers:
        parts += ["", _gather_table(report.gathers)]
    if report.fusions:
        parts.append(_fusion_line(report.fusions))
    if report.advice:
        parts.append(report.advice)
    return text_of(parts, width)


def gain(report: Report) -> str:
    """How many of eager autocast's casts amp removes, in one line; why there is nothing to compare."""
    if not report.balance:
        left = any(graph.left for graph in report.graphs)
        return "every graph is left to autocast" if left else "no casts" if report.graphs else _without_graphs(report)
    groups: dict[str, list[Total]] = {"eager autocast": [], PER_UPDATE: [], "amp": []}
    for total in report.balance:
        groups[next(name for name in groups if name in total.stage)].append(total)
    (eager, eager_bytes), (once, once_bytes), (ours, our_bytes) = (
        (sum(total.casts for total in totals), human_bytes(sum(total.bytes for total in totals)))
        for totals in groups.values()
    )
    span = "step" if len(groups["eager autocast"]) > 1 else "call"
    line = f"amp casts {ours} times a {span}, {our_bytes}, where eager autocast does {eager} times, {eager_bytes}"
    if eager > ours:
        line = (
            f"amp removes {eager - ours} of eager autocast's {eager} casts a {span}, {eager_bytes} become {our_bytes}"
        )
    return line + f"; {once} of weights run {PER_UPDATE} instead, {once_bytes}" * bool(once)


def widened(graph: GraphRecord, advice: str) -> str:
    """How many products a CPU runs in float32, and why; empty if none."""
    wide, products = graph.products
    why = "this CPU has no units for the type" if advice else "this CPU is faster so"
    of = f"{wide} of {products} matrix products and convolutions, backward included,"
    return f"{of} run in f32 on rounded operands: {why}" if wide else ""


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


def _cast_table(casts: Sequence[CastRecord], reasons: Footnotes, backward: Sequence[JointCast] = ()) -> Table:
    table = table_of(["cast for", "module", "line", "of", "dtypes", "shape", "runs"], ["times", "bytes", "why"])
    merged: dict[tuple[str, ...], list[CastRecord | JointCast]] = {}
    for c in casts:
        row = (c.op, _layers(c.module), os.path.basename(c.source), c.shown, c.dtypes, c.sizes, c.when, c.because)
        merged.setdefault(row, []).append(c)
    for j in backward:
        place, sizes = (_layers(j.module), os.path.basename(j.source)), "x".join(map(str, j.shape)) or "scalar"
        of = "gradient" if j.of.startswith("tangents") else j.of
        merged.setdefault(("", *place, of, j.dtypes, sizes, "backward", ""), []).append(j)
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


def _balance_table(totals: Sequence[Total]) -> Table:
    table = table_of(["casts"], ["times", "bytes"])
    for total in totals:
        table.add_row(total.stage, str(total.casts), human_bytes(total.bytes))
    return table


def _gather_table(gathers: Sequence[GatherRecord]) -> Table:
    table = table_of(["weight", "gathered as", "because"], ["bytes saved"])
    for gather in gathers:
        table.add_row(gather.weight, gather.gathered_as, gather.because, human_bytes(gather.bytes_saved))
    return table


def _fusion_line(fusions: Sequence[FusionRecord]) -> str:
    families = ", ".join(f"{times} {family}" for family, times in Counter(f.family for f in fusions).items())
    saved, freed = (human_bytes(sum(sizes)) for sizes in zip(*((f.saved, f.freed) for f in fusions), strict=True))
    return f"fused: {families}; by count {saved} less moved in one call, {freed} less held"
