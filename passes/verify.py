"""Valid in, valid out: recompute the dtype of every value and compare it with what the graph claims."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, map_arg

from ampcompile.torch_private import tracing
from ampcompile.torch_private.types import OpOverload

from .analysis.schema import writes
from .graph import UNDECIDED, graphs, source_line


def verify(gm: GraphModule) -> None:
    """Raise AssertionError at the first op whose fake value has another dtype than running it again gives.

    Until the casts are inserted a graph's values are those of the autocast trace, which its ops alone don't give.
    """
    if UNDECIDED in gm.meta:
        return
    with tracing.on_fakes_of(gm), torch.no_grad():
        for graph in graphs(gm):
            _verify(graph)


def _verify(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        claimed = node.meta.get("val")
        on_tensors = isinstance(node.target, OpOverload) and isinstance(claimed, torch.Tensor)
        if not on_tensors or writes(node.target):
            continue
        found = node.target(*_values(node.args), **_values(node.kwargs))
        assert found.dtype == claimed.dtype, (
            f"{node.format_node()} claims {claimed.dtype}, gives {found.dtype} ({source_line(node)})"
        )


def _values(arguments: Any) -> Any:
    return map_arg(arguments, lambda node: node.meta["val"])
