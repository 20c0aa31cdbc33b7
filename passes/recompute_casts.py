"""What backward reads is kept in the fewest bytes: casts are done again there where that keeps less.

torch itself never recomputes a cast that backward's products or losses read. But a value widened from a low type is
kept as it was, at half the bytes, and the 16-bit form of a weight that is cast in every call is not kept at all: the
weight is there anyway. Other narrow values are smaller than what they were made from, and are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.dtypes import is_lossless

from .commuting import CAST
from .graph import bodies, placeholders
from .sizes import in_floats

_AFTER = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_TAG = "recompute"  # torch's own, by which checkpoints tell the same; it comes through differentiation


@dataclass(frozen=True)
class RecomputeCasts:
    """Tags the casts of weights. `is_weight(index, placeholder)`. Returns how many casts were tagged."""

    is_weight: Callable[[int, Node], bool]
    name = "recompute_casts"
    exact = True

    def apply(self, gm: GraphModule) -> int:
        weights = {node for i, node in enumerate(placeholders(gm)) if self.is_weight(i, node)}
        casts = gm.graph.find_nodes(op="call_function", target=CAST)
        return sum(_tag(cast) for cast in casts if "amp_cast" in cast.meta and _behind_views(cast.args[0]) in weights)


def recompute_after_differentiation(graph: Graph) -> int:
    """Tag the widening casts of a joint graph that backward reads; returns how many. An inference graph has none."""
    backward = {node for node in placeholders(graph.owning_module) if str(node.target).startswith("tangents")}
    for node in graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    returned = set(graph.output_node().all_input_nodes)
    casts = [node for node in graph.nodes if _widens(node) and node not in backward | returned]
    tagged = sum(_tag(cast) for cast in casts if any(user in backward for user in _readers(cast)))
    return tagged + sum(recompute_after_differentiation(body.graph) for _, body in bodies(graph.owning_module))


def _tag(cast: Node) -> bool:
    tagged = _TAG not in cast.meta  # in a checkpoint that is settled
    cast.meta.setdefault(_TAG, CheckpointPolicy.PREFER_RECOMPUTE)
    return tagged


def _behind_views(value: object) -> object:
    while isinstance(value, Node) and isinstance(value.target, OpOverload) and value.target.is_view:
        value = value.args[0]
    return value


def _widens(node: Node) -> bool:
    if node.target not in _AFTER:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return in_floats(before) and after.itemsize > before.itemsize and is_lossless(before.dtype, after.dtype)


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a value, views of it included."""
    for user in node.users:
        yield user
        if isinstance(user.target, OpOverload) and user.target.is_view:
            yield from _readers(user)
