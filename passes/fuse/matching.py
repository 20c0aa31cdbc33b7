"""Helpers that fuse passes share: views that a match looks through, the record of a fusion, its cost model."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW
from ampcompile.kernels.usable import memory_of, usable
from ampcompile.passes.analysis.commuting import classify_movement
from ampcompile.passes.analysis.op_traits import FUSED_THROUGH, has
from ampcompile.passes.base import Pass
from ampcompile.passes.graph import Fusion, call_on_values, decision_of, graphs, note

GRAPH_BEFORE_FUSION = "amp_unfused"
"""Key in `gm.meta` of the graph before fusing, for second derivatives: a fused op's backward has none."""


@dataclass(frozen=True)
class FusionCost:
    """Decides if a pattern is fused: `fuse` is the option of that name.

    A family that the user names is fused wherever it matches. With "auto" byte counts decide. No GPU run has confirmed
    them, so the saving must be clear: a quarter of the bytes that Inductor's own code moves for the pattern, or a tenth
    of the device's memory.
    """

    fuse: str

    def considers(self, family: str) -> bool:
        """True if the option enables a family."""
        return self.fuse == "auto" or family in self.fuse.split("+")

    def pays(self, device: torch.device, saved: int | None, moved: int | None, freed: int = 0) -> bool:
        """Decide whether to fuse: `saved` of the `moved` bytes, `freed` as in `Fusion`; None: run-time sizes."""
        if device.type == "cuda" and not usable():
            return False
        if self.fuse != "auto":
            return True
        if device.type != "cuda" or saved is None or moved is None:
            return False
        return 4 * saved >= moved > 0 or 10 * freed >= memory_of(device) > 0


class FusePass(Pass, Protocol):
    """A pass `fuse_*`: a frozen dataclass whose field `cost` is a `FusionCost`."""

    @property
    def family(self) -> str: ...


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
