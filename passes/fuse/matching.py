"""Helpers for passes that fuse ops: views that a match looks through, the fused op, the record of a fusion."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.commuting import classify_movement
from ampcompile.passes.analysis.op_traits import FUSED_THROUGH, has
from ampcompile.passes.graph import Fusion, call_on_values, decision_of, graphs, note

GRAPH_BEFORE_FUSION = "amp_unfused"
"""Key in `gm.meta` of the graph before fusing, for second derivatives: a fused op's backward has none."""


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def is_low(node: Any) -> bool:
    """True if a node is a dense 16-bit floating tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in LOW and value.layout is torch.strided


def is_view(node: Any) -> bool:
    """True if a node returns its first operand's numbers, or some of them, each once, in other places."""
    return isinstance(node, Node) and classify_movement(node) == "moves" and has(node.target, FUSED_THROUGH)


def fuse(old: Node, op: Any, args: Sequence[Any], record: Fusion) -> Node:
    """Replace `old` by the result of `op`, the first if it has several, and return that.

    Call it inside `tracing.on_fakes_of`. Nodes without readers stay until `erase_unread`.
    """
    graph = old.graph
    inherited_meta = {key: value for key, value in old.meta.items() if key not in ("val", "tensor_meta")}
    with graph.inserting_before(old):
        result = call = graph.call_function(op, tuple(args))
        values = call_on_values(call)
        call.meta = {**inherited_meta, "val": values}
        note(call, fusion=record)
        if isinstance(values, tuple):
            result = graph.call_function(operator.getitem, (call, 0))
            result.meta = {**inherited_meta, "val": values[0]}
    old.replace_all_uses_with(result)
    return result


def fusions(gm: GraphModule) -> Iterator[tuple[Node, Fusion]]:
    """Yield every fused op of a graph and its bodies, with its record."""
    for graph in graphs(gm):
        for node in graph.graph.nodes:
            if (fusion := decision_of(node).fusion) is not None:
                yield node, fusion
