"""The report that `ampcompile.explain` returns, its page, and its text: layers share rows, reasons are footnotes."""

import json
import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from rich.table import Table

from ampcompile.records.graphs import (
    BACKWARD,
    INSERTED,
    PER_UPDATE,
    CastRecord,
    GraphRecord,
    OpRecord,
    SavedRecord,
    Total,
    add_up,
    plain,
)
from ampcompile.sharding.weight import GatherRecord

from .saved import SavedTotals, fold_layers, rows_for_page, saved_table
from .show import human_bytes, table, text_of


@dataclass(frozen=True, repr=False)
class Report:
    """All graphs that Dynamo found in a call, as rewritten. `str(report)` is a table that fits the terminal.

    In a notebook, a report is shown as its page.
    """

    graphs: Sequence[GraphRecord]
    results: Sequence[CastRecord] = ()
    """The casts of the call's results that aren't part of a graph."""
    of_caller: tuple[int, int] = (0, 0)
    """Bytes of results that only the caller holds, and what a loss within the compiled function would free of them."""
    breaks: Sequence[str] = ()
    """Why Dynamo didn't compile the code before a graph, or any code at all."""
    about: str = ""
    """The callable, the versions and the date."""
    gathers: Sequence[GatherRecord] = ()
    """How FSDP gathers each weight under a shard policy; see `ampcompile.shard_policy`."""
    advice: str = ""
    """A line about a CPU without units for a 16-bit type that a graph uses; else empty."""

    @property
    def code(self) -> str:
        """A `def forward` for every graph as rewritten, with the dtype and shape of every value."""
        return self._titled(lambda graph: graph.code)

    @property
    def joint_code(self) -> str:
        """Every graph after differentiation, forward and backward in one; empty with `lower="eager"`."""
        return self._titled(lambda graph: graph.joint_code)

    def _titled(self, text: Callable[[GraphRecord], str]) -> str:
        return "\n\n".join(f"# graph {i}: {g.precision}\n{text(g)}" for i, g in enumerate(self.graphs) if text(g))

    @property
    def casts(self) -> list[CastRecord]:
        """Every cast inserted, in order; those outside of graphs last."""
        return [*(cast for graph in self.graphs for cast in graph.casts), *self.results]

    @property
    def saved(self) -> list[SavedRecord]:
        """What backward keeps, in order: a record for each value; of values that share memory, one."""
        return [record for graph in self.graphs for record in graph.saved]

    @property
    def saved_totals(self) -> SavedTotals:
        """Bytes kept for backward, of results that only the caller holds, and of what is alive anyway."""
        kept, alive = (sum(r.bytes for r in self.saved if r.alive_anyway is anyway) for anyway in (False, True))
        return SavedTotals(kept, *self.of_caller, alive)

    @property
    def ops(self) -> list[OpRecord]:
        """Every op on tensors, in order."""
        return [op for graph in self.graphs for op in graph.ops]

    @property
    def unknown_ops(self) -> list[str]:
        """Names of the ops that are unknown to the policy: they run in the dtypes that arrive."""
        return sorted({op.op for op in self.ops if not op.known})

    @property
    def totals(self) -> list[Total]:
        """Conversions per call, after each pass and after differentiation. All graphs together."""
        sums: dict[str, list[Total]] = {}
        for total in (total for graph in self.graphs for total in graph.totals):
            sums.setdefault(total.stage, []).append(total)
        return [Total(s, sum(t.casts for t in each), sum(t.bytes for t in each)) for s, each in sums.items()]

    @property
    def balance(self) -> list[Total]:
        """The casts of a call: as eager autocast would place them under the same policy, then those of amp as they run.

        Those that are there because a CPU multiplies in float32 don't count: Inductor fuses them.
        """
        stages = {total.stage: total for total in self.totals}
        if INSERTED not in stages:
            return []
        inserted, casts = stages[INSERTED], [cast for graph in self.graphs for cast in graph.casts]
        ours = [cast for cast in casts if cast.dtype_to.itemsize > 1]  # what 8 bits need comes after
        rows = [
            replace(inserted, stage="eager autocast, forward"),
            replace(stages.get(BACKWARD, Total(BACKWARD, 0, 0)), stage="eager autocast, backward"),
            *(add_up(f"amp, {when}", [c for c in self.casts if c.when == when]) for when in ("every call", PER_UPDATE)),
            add_up("amp, backward", [cast for graph in self.graphs for cast in graph.backward_casts]),
            Total("amp, written in your code", inserted.casts - len(ours), inserted.bytes - sum(c.bytes for c in ours)),
        ]
        return [row for row in rows if row.casts]

    @property
    def gain(self) -> str:
        """How many casts amp runs, and eager autocast, in one line; or why there are none."""
        if not self.graphs:
            nothing = "Dynamo made no graph: nothing is compiled"
            return nothing if self.breaks else f"{nothing}. torch._dynamo.reset() before this call may show why"
        if not self.balance:
            return "every graph is left to autocast" if any(graph.left for graph in self.graphs) else "no casts"
        groups: dict[str, list[Total]] = {"eager autocast": [], PER_UPDATE: [], "amp": []}
        for total in self.balance:
            groups[next(name for name in groups if name in total.stage)].append(total)
        (eager, eager_bytes), (once, once_bytes), (ours, our_bytes) = (
            (sum(total.casts for total in totals), human_bytes(sum(total.bytes for total in totals)))
            for totals in groups.values()
        )
        span = "step" if len(groups["eager autocast"]) > 1 else "call"
        line = f"amp casts {ours} times a {span}, {our_bytes}, where eager autocast does {eager} times, {eager_bytes}"
        if eager > ours:
            removed = f"amp removes {eager - ours} of eager autocast's {eager} casts a {span}"
            line = f"{removed}, {eager_bytes} become {our_bytes}"
        fused = " (a fused step casts none)" * (span == "step")
        return line + f"; {once} of weights run {PER_UPDATE} instead{fused}, {once_bytes}" * bool(once)

    @property
    def notes(self) -> list[str]:
        """Lines about products that run in float32, about the CPU, and about a budget."""
        return [*filter(None, (*map(self._widened, self.graphs), self.advice, *map(_peak, self.graphs)))]

    def _widened(self, graph: GraphRecord) -> str:
        wide, products = graph.products
        why = "this CPU has no units for the type" if self.advice else "this CPU is faster so"
        of = f"{wide} of {products} matrix products and convolutions, backward included,"
        return f"{of} run in f32 on rounded operands: {why}" if wide else ""

    def save(self, path: str | Path) -> None:
        """Write the report as a self-contained page: `report.save("amp.html")`."""
        Path(path).write_text(_page(self), encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, graph by graph, with dtypes as `bf16`: for JSON."""
        names = ("unknown_ops", "totals", "saved_totals")
        return plain(self) | {name: plain(getattr(self, name)) for name in names}

    def _repr_html_(self) -> str:
        # In a frame, where neither its styles nor its names meet others of the notebook.
        return f'<iframe srcdoc="{escape(_page(self))}" style="width: 100%; height: 600px; border: 0"></iframe>'

    def __repr__(self) -> str:
        return f"<ampcompile report: {len(self.graphs)} graphs, {len(self.ops)} ops, {len(self.casts)} casts>"

    def __str__(self) -> str:
        return text_of(self._parts())

    def _parts(self) -> list[str | Table]:
        """The lines and tables of the text; what was gained comes first."""
        parts: list[str | Table] = [self.gain, ""]
        reasons = defaultdict[str, int](count(1).__next__)  # numbers of the footnotes
        if self.balance:
            rows = [(total.stage, str(total.casts), human_bytes(total.bytes)) for total in self.balance]
            parts += [table(["casts"], ["times", "bytes"], rows), ""]
        for index, graph in enumerate(self.graphs):
            counts = f", {len(graph.ops)} ops, {len(graph.casts)} casts" if not graph.left else ""
            parts.append(f"graph {index} of {len(self.graphs)}: {graph.precision}{counts}")
            if graph.casts or graph.backward_casts:
                parts.append(_cast_table([*graph.casts, *graph.backward_casts], reasons))
            if not graph.left:
                parts.append(_op_table(graph.ops, reasons))
            if widened := self._widened(graph):
                parts.append(widened)
            if graph.reason:
                parts.append(f"graph break after graph {index}: {graph.reason}")
            parts.append("")
        parts += [f"graph break before a graph: {reason}" for reason in self.breaks]
        if self.results:
            parts += ["results of the call", _cast_table(self.results, reasons), ""]
        parts += [f"[{number}] {text}" for text, number in reasons.items()]
        if self.saved:
            parts += ["", saved_table(self.saved, self.saved_totals), *filter(None, map(_peak, self.graphs))]
        if unknown := self.unknown_ops:
            parts.append(f"unknown to the policy: {', '.join(unknown)} (ampcompile.register_op gives a rule)")
        if self.gathers:
            gathers = [(*gather[:3], human_bytes(gather.bytes_saved)) for gather in self.gathers]
            parts += ["", table(["weight", "gathered as", "because"], ["bytes saved"], gathers)]
        return [*parts, self.advice] if self.advice else parts


def _peak(graph: GraphRecord) -> str:
    """What a budget gives, and the larger one whose peak is smaller."""
    if not graph.peaks:
        return ""
    (given, peak), (best, least) = graph.peaks[0], min(graph.peaks, key=lambda counted: counted[1])
    line = f"a budget of {given:g}: at most {human_bytes(peak)} alive at once, as counted"
    return line + f"; at {best:g} only {human_bytes(least)}, take that" * (least < peak)


def _cast_table(casts: Sequence[CastRecord], reasons: defaultdict[str, int]) -> Table:
    merged: dict[tuple[str, ...], list[CastRecord]] = {}
    for c in casts:
        key = (c.op, fold_layers(c.module), c.line, c.of, c.dtypes, c.sizes, c.when, c.because)
        merged.setdefault(key, []).append(c)
    rows = []
    for (op, layers, *rest, because), equal in merged.items():
        module = layers if len({c.module for c in equal}) > 1 else equal[0].module
        size = human_bytes(sum(c.bytes for c in equal))
        rows.append((op, module, *rest, str(len(equal)), size, _footnote(because, reasons)))
    return table(["cast for", "module", "line", "of", "dtypes", "shape", "runs"], ["times", "bytes", "why"], rows)


def _op_table(ops: Sequence[OpRecord], reasons: defaultdict[str, int]) -> Table:
    counted = Counter((op.op, op.in_dtype, op.because) for op in ops)
    rows = [
        (op, dtype, str(times), _footnote(because, reasons)) for (op, dtype, because), times in sorted(counted.items())
    ]
    return table(["op", "dtype"], ["times", "why"], rows)


def _footnote(reason: str, reasons: defaultdict[str, int]) -> str:
    return str(reasons[reason]) if reason else ""


def _page(report: Report) -> str:
    """The self-contained page of a report: the graph by module, searchable, all casts with sizes and reasons."""
    sources = {each.source for each in (*(value for graph in report.graphs for value in graph.values), *report.casts)}
    lines = {source: line for source in sources if (line := _line(source))}
    data = report.as_dict() | {name: plain(getattr(report, name)) for name in ("gain", "notes", "balance")}
    data["kept"] = rows_for_page(report.saved)
    folder = files(__package__) / "page"
    text = json.dumps(data | {"lines": lines}, separators=(",", ":"), allow_nan=False)
    parts = {"data": text.replace("<", "\\u003c")}  # data inside a script element must not contain its end tag

    def read(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    # One substitution for all: inserted text may look like a placeholder itself.
    return re.sub(r"/\*([a-z.]+)\*/", lambda match: parts.get(match[1]) or read(match[1]), read("page.html"))


def _line(source: str) -> str:
    path, _, number = source.rpartition(":")
    return linecache.getline(path, int(number)).strip() if path else ""
