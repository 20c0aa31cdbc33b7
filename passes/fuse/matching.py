"""What the fuse passes share: what a match may look through, the record of a fusion, when a fusion pays."""

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
from ampcompile.passes.graph import call_on_values, graphs

FUSION = "amp_fused"
"""Where a fused op carries its record, in `node.meta`."""
GRAPH_BEFORE_FUSION = "amp_unfused"
"""Where `gm.meta` holds the graph as it was before fusing: a fused op has no derivative of its backward."""


@dataclass(frozen=True)
class Fusion:
    """The record that a fused op carries. `op`: what it stands for, as `aten.cross_entropy_loss`."""

    family: str
    op: str
    saved: int
    """Bytes that memory doesn't move, forward and backward, as the graph was traced; against Inductor's own code."""
    freed: int = 0
    """Bytes that are never held at the same time."""


@dataclass(frozen=True)
class FusionCost:
    """When a pattern is fused: `fuse` is the option of that name.

    A family that the user names is fused wherever it matches. With "auto" the counts decide, which no GPU run has
    confirmed, so they must be clear: a quarter of the bytes that Inductor's own code moves for the pattern, or memory
    of a tenth of the device's.
    """

    fuse: str

    def considers(self, family: str) -> bool:
        """Whether a family is looked for at all."""
        return self.fuse == "auto" or family in self.fuse.split("+")

    def pays(self, device: torch.device, saved: int | None, moved: int | None, freed: int = 0) -> bool:
        """Whether to fuse: `saved` of the `moved` bytes, and `freed`, as in `Fusion`; None: known at run time only."""
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
    """Whether a node is a dense 16-bit floating tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in LOW and value.layout is torch.strided


def is_view(node: Any) -> bool:
    """Whether a node gives its first operand's numbers, or some of them, each once, in other places."""
    return isinstance(node, Node) and classify_movement(node) == "moves" and has(node.target, FUSED_THROUGH)


def fuse(old: Node, op: Any, args: Sequence[Any], record: Fusion) -> Node:
    """Put the result of `op`, the first if it has several, in the place of `old`, and return it.

    Call it inside `tracing.on_fakes_of`. What nobody reads afterwards is left to `erase_unread`.
    """
    graph = old.graph
    known = {key: value for key, value in old.meta.items() if key not in ("val", "tensor_meta")}
    with graph.inserting_before(old):
        result = call = graph.call_function(op, tuple(args))
        values = call_on_values(call)
        call.meta = {**known, "val": values, FUSION: record}
        if isinstance(values, tuple):
            result = graph.call_function(operator.getitem, (call, 0))
            result.meta = {**known, "val": values[0]}
    old.replace_all_uses_with(result)
    return result


def fusions(gm: GraphModule) -> Iterator[tuple[Node, Fusion]]:
    """Every fused op of a graph and its bodies."""
    for graph in graphs(gm):
        yield from ((node, node.meta[FUSION]) for node in graph.graph.nodes if FUSION in node.meta)
