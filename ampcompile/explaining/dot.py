"""A report in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ampcompile.records.casts import CastRecord, GraphRecord
from ampcompile.records.graph import NodeRecord

from .text import human_bytes

_COLOURS = {"bf16": "#1d63d1", "f16": "#0b7a4b", "f32": "#b45309", "f64": "#8b2fc9"}


def dot(graphs: Sequence[GraphRecord]) -> str:
    """One digraph: modules are nested clusters, ops are coloured by dtype, casts are labelled edges.

    An edge with a cast is as thick as its bytes tell, and dashed if the cast doesn't run in every call.
    """
    lines = ["digraph precision {", "  node [shape=box, style=filled, fontcolor=white];"]
    for number, graph in enumerate(graphs):
        lines += _modules(number, [node for node in graph.nodes if node.kind in ("op", "output")])
        lines += _edges(number, graph)
    return "\n".join([*lines, "}"]) + "\n"


def _modules(number: int, nodes: Sequence[NodeRecord], path: tuple[str, ...] = ()) -> Iterator[str]:
    """The cluster of one module: its own ops, and the clusters of the modules inside it."""
    inner: dict[str, list[NodeRecord]] = {}
    title = path[-1] if path else f"graph {number}"
    yield f"subgraph {_quoted('.'.join((f'cluster_{number}', *path)))} {{ label={_quoted(title)};"
    for node in nodes:
        below = tuple(filter(None, node.module.split(".")))[len(path) :]
        if below:
            inner.setdefault(below[0], []).append(node)
        else:
            yield _box(number, node.name, (node.op or "returned", node.dtype), _COLOURS.get(node.dtype, "#5b6675"))
    for name, found in inner.items():
        yield from _modules(number, found, (*path, name))
    yield "}"


def _edges(number: int, graph: GraphRecord) -> Iterator[str]:
    """What each op reads; of the graph's inputs, only those that are cast."""
    nodes = {node.name: node for node in graph.nodes}
    inputs: set[str] = set()
    for node in graph.nodes:
        for name in node.inputs if node.kind in ("op", "output") else ():
            source, casts = _behind_casts(nodes.get(name), nodes, graph.numbered_casts)
            if source is None or (source.kind == "input" and not casts):
                continue
            if source.kind == "input" and source.name not in inputs:
                inputs.add(source.name)
                yield _box(number, source.name, (source.name, source.dtype), "#94a3b8")
            yield f"{_name(number, source.name)} -> {_name(number, node.name)}{_style(casts)};"


def _behind_casts(
    node: NodeRecord | None, nodes: Mapping[str, NodeRecord], casts: Mapping[int, CastRecord]
) -> tuple[NodeRecord | None, list[CastRecord]]:
    through = []
    while node is not None and node.cast is not None:
        through.append(casts[node.cast])
        node = nodes.get(node.inputs[0])
    return node, through


def _style(casts: Sequence[CastRecord]) -> str:
    if not casts:
        return ""
    size = sum(cast.bytes for cast in casts)
    dashes = "" if any(cast.runs for cast in casts) else ", style=dashed"
    return f" [color=red, penwidth={min(6, 1 + size.bit_length() / 6):.1f}, label={_quoted(human_bytes(size))}{dashes}]"


def _box(number: int, name: str, label: Sequence[str], colour: str) -> str:
    return f"{_name(number, name)} [label={_quoted(*filter(None, label))}, fillcolor={_quoted(colour)}];"


def _name(number: int, name: str) -> str:
    return _quoted(f"{number}/{name}")


def _quoted(*lines: str) -> str:
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'
