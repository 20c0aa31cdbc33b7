"""Valid in, valid out: recompute the dtype of every value and compare it with what the graph claims."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg

from ampcompile import compat_tracing

from .graph import ENTER, EXIT, source_line


def verify(gm: GraphModule) -> None:
    """Raise AssertionError at the first op whose fake value has another dtype than running it again gives.

    Regions and higher-order ops are passed over: decisions may not have been carried out yet.
    """
    if any(node.target in (ENTER, EXIT) for node in gm.graph.nodes):
        return
    with compat_tracing.on_fakes_of(gm), torch.no_grad():
        for node in gm.graph.nodes:
            if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
                continue
            found = node.target(*_values(node.args), **_values(node.kwargs))
            claimed = node.meta.get("val")
            if isinstance(found, torch.Tensor) and isinstance(claimed, torch.Tensor):
                assert found.dtype == claimed.dtype, (
                    f"{node.format_node()} claims {claimed.dtype}, gives {found.dtype} ({source_line(node)})"
                )


def _values(arguments: Any) -> Any:
    def value(node: Node) -> Any:
        return node.meta["val"]

    return map_arg(arguments, value)
