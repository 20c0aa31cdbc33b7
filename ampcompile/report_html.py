"""A report as one self-contained page: the graph by module, searchable, every cast with its size and its reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from .report_records import GraphRecord
from .report_totals import Total


def page(graphs: Sequence[GraphRecord], totals: Sequence[Total], unknown: Sequence[str]) -> str:
    """The page's text. It loads nothing, so it opens from a disk or an attachment."""
    data = {"graphs": [_graph(g) for g in graphs], "totals": [asdict(t) for t in totals], "unknown": list(unknown)}
    parts = {name: (files(__package__) / "page" / f"page.{name}").read_text() for name in ("html", "css", "js")}
    # `</` would end the script element that holds the data.
    parts["data"] = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    text = parts.pop("html")
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part)
    return text


def _graph(graph: GraphRecord) -> dict[str, Any]:
    index = {node.name: i for i, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        plain = asdict(node)
        plain["inputs"] = [index[name] for name in node.inputs if name in index]
        number = plain.pop("cast")
        if number is not None:
            cast = graph.numbered_casts[number]
            plain |= {"of": cast.of, "bytes": cast.bytes, "fate": list(cast.fate)}
        nodes.append(plain)
    return {"precision": graph.precision, "reason": graph.reason, "nodes": nodes}
