"""Render a report as a self-contained page: the graph by module, searchable, all casts with sizes and reasons."""

from __future__ import annotations

import json
import linecache
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from ampcompile.dtypes import short_name
from ampcompile.records.casts import CastRecord, GraphRecord

from .table import gain, widened

if TYPE_CHECKING:
    from .report import Report


_Numbers = defaultdict[str, int]
"""Numbers of texts that many records share."""


class ErrorsByModule(Protocol):
    """The part of an audit's `Sensitivities` that a page shows."""

    @property
    def floor(self) -> float:
        """The error with all modules in float32."""

    def by_module(self) -> dict[str, dict[str, float]]:
        """Squared errors that each module adds to each result."""


def page(report: Report, sensitivities: ErrorsByModule | None = None) -> str:
    """The page's text."""
    return fill("page.html", __package__, _data(report) | {"added": _added(sensitivities)})


def fill(name: str, package: str, data: Any) -> str:
    """Return the page of this name in a package's folder `page`, with data as JSON and the files that it names in it.

    Files are looked for there and then among those of this package, which all pages share. The text loads no other
    files, so it opens from a disk or an attachment.
    """
    folders = [files(package) / "page", files(__package__) / "page"]
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {"data": text.replace("<", "\\u003c")}  # data inside a script element must not contain its end tag

    def read(file: str) -> str:
        return next(folder / file for folder in folders if (folder / file).is_file()).read_text(encoding="utf-8")

    # One substitution for all: inserted text may look like a placeholder itself.
    return re.sub(r"/\*([a-z.]+)\*/", lambda match: parts.get(match[1]) or read(match[1]), read(name))


def frame(text: str) -> str:
    """Return a page as an element of a notebook: in a frame, where neither its styles nor its names meet others."""
    return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 600px; border: 0"></iframe>'


def _data(report: Report) -> dict[str, Any]:
    graphs = report.graphs
    texts: _Numbers = defaultdict(count().__next__)
    numbered = {number: cast for graph in graphs for number, cast in graph.numbered_casts.items()}
    index = {number: i for i, number in enumerate(numbered)}
    casts = [*numbered.values(), *report.results]  # those of results are outside of graphs
    drawn = [
        {"precision": graph.precision, "reason": graph.reason, "ops": list(_ops(graph, index, texts))}
        for graph in graphs
    ]
    sources = {node.source for graph in graphs for node in graph.nodes} | {cast.source for cast in casts}
    return {
        "graphs": drawn,
        "casts": [_cast(cast, texts) for cast in casts],
        "totals": [asdict(total) for total in report.balance],
        "gain": gain(report),
        "about": report.about,
        "notes": [*filter(None, (*(widened(graph, report.advice) for graph in graphs), report.advice))],
        "backward": [asdict(cast) for graph in graphs for cast in graph.backward_casts],
        "eager": [asdict(each) for each in report.eager],
        "unknown": report.unknown_ops,
        "lines": {source: line for source in sources if (line := _line(source))},
        "texts": list(texts),
    }


def _added(sensitivities: ErrorsByModule | None) -> dict[str, Any] | None:
    if sensitivities is None:
        return None
    modules = {
        module: {result: _finite(square) for result, square in squares.items() if square}
        for module, squares in sensitivities.by_module().items()
    }
    return {"floor": _finite(sensitivities.floor), "modules": modules}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def _ops(graph: GraphRecord, index: dict[int, int], texts: _Numbers) -> Iterator[dict[str, Any]]:
    """Yield the rows to draw: casts are listed with the operands of the ops that read them."""
    nodes = {node.name: node for node in graph.nodes}
    shown = [node for node in graph.nodes if node.kind in ("op", "output")]
    rows = {node.name: i for i, node in enumerate(shown)}

    def read(name: str) -> list[Any]:
        casts = []
        while (node := nodes[name]).cast is not None:
            casts.append(index[node.cast])
            name = node.inputs[0]
        return [rows.get(name, -1), name, casts]

    for node in shown:
        yield {
            "name": node.name,
            "op": node.op or "returned",
            "module": texts[node.module],
            "source": texts[node.source],
            "dtype": node.dtype,
            "shape": node.shape,
            "because": texts[node.because],
            "reads": [read(name) for name in node.inputs if name in nodes],
        }


def _cast(cast: CastRecord, texts: _Numbers) -> dict[str, Any]:
    fields = asdict(cast) | {"because": texts[cast.because], "runs": cast.runs, "of": cast.shown}
    dtypes = {"from": short_name(fields.pop("dtype_from")), "to": short_name(fields.pop("dtype_to"))}
    return fields | dtypes


def _line(source: str) -> str:
    path, _, number = source.rpartition(":")
    return linecache.getline(path, int(number)).strip() if path else ""
