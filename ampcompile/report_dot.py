"""A report in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .report_graph import NodeRecord
from .report_records import GraphRecord

_COLOURS = {"bf16": "#1f77b4", "f16": "#2ca02c", "f32": "#d97706", "f64": "#9333ea"}


def dot(graphs: Sequence[GraphRecord]) -> str:
    """One digraph; modules are clusters, ops are coloured by dtype, casts are red edges labelled with theirs."""
    lines = ["digraph precision {", "  rankdir=TB; node [shape=box, style=filled, fontcolor=white];"]
    for number, graph in enumerate(graphs):
        lines += _clusters(number, graph)
        lines += _edges(number, graph)
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(number: int, graph: GraphRecord) -> Iterator[str]:
    by_module: dict[str, list[NodeRecord]] = {}
    for node in graph.nodes:
        if node.kind == "op" or node.kind == "output":
            by_module.setdefault(node.module, []).append(node)
    for module, nodes in by_module.items():
        yield f"  subgraph {_quoted(f'cluster_{number}_{module}')} {{ label={_quoted(module or f'graph {number}')};"
        for node in nodes:
            label = "\\n".join(filter(None, (node.op or "output", node.dtype)))
            colour = _COLOURS.get(node.dtype, "#64748b")
            yield f'    {_name(number, node.name)} [label={_quoted(label)}, fillcolor="{colour}"];'
        yield "  }"


def _edges(number: int, graph: GraphRecord) -> Iterator[str]:
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.kind not in ("op", "output"):
            continue
        for name in node.inputs:
            source = nodes.get(name)
            through = source if source is not None and source.kind == "cast" else None
            if through is not None:
                source = nodes.get(through.inputs[0])
            if source is None or (source.kind == "input" and through is None):
                continue
            if source.kind == "input":
                yield f'  {_name(number, source.name)} [label={_quoted(source.name)}, fillcolor="#94a3b8"];'
            style = f" [color=red, label={_quoted(through.dtype)}]" if through is not None else ""
            yield f"  {_name(number, source.name)} -> {_name(number, node.name)}{style};"


def _name(number: int, name: str) -> str:
    return _quoted(f"{number}/{name}")


def _quoted(text: str) -> str:
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'
