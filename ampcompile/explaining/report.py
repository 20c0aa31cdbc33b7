"""The report that `ampcompile.explain` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ampcompile.records.casts import PER_UPDATE, CastRecord, FusionRecord, GraphRecord, OpRecord, plain
from ampcompile.records.totals import EAGER_BACKWARD, EAGER_FORWARD, JointCast, Total
from ampcompile.sharding.weight import GatherRecord

from . import html, table
from .eager_modules import EagerRecord


@dataclass(frozen=True, repr=False)
class Report:
    """All graphs that Dynamo found in a call, as rewritten. `str(report)` is a table that fits the terminal.

    In a notebook, a report is shown as its page.
    """

    graphs: Sequence[GraphRecord]
    results: Sequence[CastRecord] = ()
    """The casts of the call's results that aren't part of a graph."""
    eager: Sequence[EagerRecord] = ()
    """The modules that ran eagerly, as Dynamo compiled nothing of them."""
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
        return self._code([graph.code for graph in self.graphs])

    @property
    def joint_code(self) -> str:
        """Every graph after differentiation, forward and backward in one; empty with `lower="eager"`."""
        return self._code([graph.joint_code for graph in self.graphs])

    def _code(self, texts: list[str]) -> str:
        titled = zip(count(), self.graphs, texts, strict=False)
        return "\n\n".join(f"# graph {i}: {graph.precision}\n{text}" for i, graph, text in titled if text)

    @property
    def casts(self) -> list[CastRecord]:
        """Every cast inserted, in order; those outside of graphs last."""
        return [*(cast for graph in self.graphs for cast in graph.casts), *self.results]

    @property
    def ops(self) -> list[OpRecord]:
        """Every op on tensors, in order."""
        return [op for graph in self.graphs for op in graph.ops]

    @property
    def fusions(self) -> list[FusionRecord]:
        """Every op that a fused kernel replaced, in order."""
        return [fusion for graph in self.graphs for fusion in graph.fusions]

    @property
    def unknown_ops(self) -> list[str]:
        """Names of the ops that are unknown to the policy: they run in the dtypes that arrive."""
        return sorted({op.op for op in self.ops if not op.known})

    @property
    def totals(self) -> list[Total]:
        """Conversions per call: in eager autocast, after each pass, and after differentiation. All graphs together."""
        sums: dict[str, Total] = {}
        for total in (total for graph in self.graphs for total in graph.totals):
            before = sums.get(total.stage, Total(total.stage, 0, 0))
            sums[total.stage] = Total(total.stage, before.casts + total.casts, before.bytes + total.bytes)
        return list(sums.values())

    @property
    def balance(self) -> list[Total]:
        """The casts of eager autocast and those of amp, by when they run; empty without a graph that amp rewrote.

        Those that are there because a CPU multiplies in float32 don't count: Inductor fuses them.
        """
        stages = {total.stage: total for total in self.totals}
        if EAGER_FORWARD not in stages:
            return []
        backward = [cast for graph in self.graphs for cast in graph.backward_casts]
        inserted, ours = stages["insert_casts"], [cast for graph in self.graphs for cast in graph.casts]
        rows = [
            stages[EAGER_FORWARD],
            stages[EAGER_BACKWARD] if self.joint_code else Total(EAGER_BACKWARD, 0, 0),
            *(_sum(f"amp, {when}", [c for c in self.casts if c.when == when]) for when in ("every call", PER_UPDATE)),
            _sum("amp, backward", backward),
            Total("amp, written in your code", inserted.casts - len(ours), inserted.bytes - sum(c.bytes for c in ours)),
        ]
        return [row for row in rows if row.casts]

    def save(self, path: str | Path, sensitivities: html.ErrorsByModule | None = None) -> None:
        """Write the report as a self-contained page: `report.save("amp.html")`.

        `sensitivities` are those of an audit of the same call, `audit.sensitivities()`: each module is then coloured
        by what its roundings add to the error.
        """
        Path(path).write_text(html.page(self, sensitivities), encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, graph by graph, with dtypes as `bf16`: for JSON."""
        graphs = [
            {"precision": graph.precision, "reason": graph.reason}
            | {
                name: [plain(each) for each in getattr(graph, name)]
                for name in ("ops", "casts", "fusions", "joint_casts")
            }
            for graph in self.graphs
        ]
        lists = {name: [plain(each) for each in getattr(self, name)] for name in ("results", "eager", "totals")}
        lists["gathers"] = [gather._asdict() for gather in self.gathers]
        texts = {"about": self.about, "advice": self.advice, "breaks": [*self.breaks], "unknown_ops": self.unknown_ops}
        return {**texts, "graphs": graphs, **lists}

    def _repr_html_(self) -> str:
        return html.frame(html.page(self))

    def __repr__(self) -> str:
        return f"<ampcompile report: {len(self.graphs)} graphs, {len(self.ops)} ops, {len(self.casts)} casts>"

    def __str__(self) -> str:
        return table.render(self)


def _sum(stage: str, casts: Sequence[CastRecord | JointCast]) -> Total:
    return Total(stage, len(casts), sum(cast.bytes for cast in casts))
