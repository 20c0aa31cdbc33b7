"""Verify a graph between passes: recompute the dtype of every value and compare it with the recorded one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from ampcompile.torch_private import pytree, tracing
from ampcompile.torch_private.types import OpOverload

from .analysis.schema import writes
from .graph import UNDECIDED, graphs, source_line


def verify(gm: GraphModule, known: dict[Any, torch.dtype] | None = None) -> None:
    """Raise AssertionError at the first op whose fake value has another dtype than running the op again gives.

    Skips graphs before `InsertCasts`: their values come from the autocast trace, and the ops alone give other dtypes.
    `known`: cache of result dtypes by op and operands, so that verifying after each of many passes runs an op once.
    """
    if UNDECIDED in gm.meta:
        return
    known = {} if known is None else known
    with tracing.on_fakes_of(gm), torch.no_grad():
        for graph in graphs(gm):
            for node in graph.graph.nodes:
                _verify(node, known)


def _verify(node: Node, known: dict[Any, torch.dtype]) -> None:
    claimed = node.meta.get("val")
    on_tensors = isinstance(node.target, OpOverload) and isinstance(claimed, torch.Tensor)
    if not on_tensors or writes(node.target):
        return
    arguments = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    key = node.target, str(pytree.tree_map_only(torch.Tensor, _kind, arguments))
    if key not in known:
        args, kwargs = arguments
        known[key] = node.target(*args, **kwargs).dtype
    assert known[key] == claimed.dtype, (
        f"{node.format_node()} claims {claimed.dtype}, gives {known[key]} ({source_line(node)})"
    )


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    """The properties of an operand that the dtype of a result may depend on."""
    strides = value.stride() if value.layout is torch.strided else ()
    return type(value).__name__, value.dtype, value.device, value.layout, tuple(value.shape), strides
