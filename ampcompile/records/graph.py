"""Plain records of a rewritten graph, one per value, for the page of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import short_name
from ampcompile.passes.graph import bodies, decision_of, graphs, module_path, op_name, source_line

from .casts import Shape, computes_in, inserted_cast, shape_of


@dataclass(frozen=True)
class NodeRecord:
    """One input, op or cast of a graph; in execution order, bodies of higher-order ops after their caller's graph."""

    name: str
    """Unique in its graph; names of a body's nodes begin with the body's name."""
    kind: str
    """"input", "op", "cast" or "output"."""
    op: str
    """The op, as `aten.linear`; of a cast, the op it was inserted for."""
    module: str
    source: str
    dtype: str
    """The dtype it computes in, as `bf16`; of a cast, `f32>bf16`; empty for values without a dtype."""
    shape: Shape
    because: str
    inputs: tuple[str, ...]
    cast: int | None
    """The number of the cast, under which its fate is recorded."""


def nodes_of(gm: GraphModule) -> Iterator[NodeRecord]:
    """Yield the values of a graph after `insert_casts`, and of its bodies."""
    prefixes = {gm: ""}
    for graph in graphs(gm):
        prefix, called = prefixes[graph], dict(bodies(graph))
        yield from (_record(node, prefix) for node in graph.graph.nodes if node not in called)
        for attribute, body in called.items():
            prefixes.setdefault(body, f"{prefix}{attribute.name}/")


def _record(node: Node, prefix: str) -> NodeRecord:
    value, cast = node.meta.get("val"), inserted_cast(node)
    return NodeRecord(
        name=prefix + node.name,
        kind="cast" if cast is not None else _KINDS.get(node.op, "op"),
        op=cast.op if cast is not None else _SPECIAL[node.op] if node.op in _SPECIAL else op_name(node.target),
        module=module_path(node),
        source=source_line(node),
        dtype=_dtype(node),
        shape=shape_of(value) if isinstance(value, torch.Tensor) else (),
        because=(cast or decision_of(node)).because,
        inputs=tuple(prefix + operand.name for operand in node.all_input_nodes),
        cast=cast.number if cast is not None else None,
    )


_SPECIAL: Mapping[str, str] = {"output": "", "call_module": "a torch.func transform"}
_KINDS: Mapping[str, str] = {"placeholder": "input", "get_attr": "input", "output": "output"}


def _dtype(node: Node) -> str:
    if inserted_cast(node) is not None:
        before, after = (n.meta["val"].dtype for n in (node.args[0], node))
        return f"{short_name(before)}>{short_name(after)}"
    dtype = computes_in(node)
    return short_name(dtype) if dtype is not None else ""
