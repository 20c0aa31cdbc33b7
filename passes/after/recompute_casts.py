"""Save fewer bytes for backward: of a value that was widened, the low one is saved, and widened once more.

torch itself never recomputes a cast that backward's products or losses read. What was cast from the graph's inputs is
saved all the same, as cast: an optimizer may write a weight before backward comes, and leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.dtypes import is_lossless
from ampcompile.passes.analysis.aliasing import base_of
from ampcompile.passes.analysis.gradients import computed_from_gradients
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has, is_view
from ampcompile.passes.analysis.sizes import is_float_tensor
from ampcompile.passes.graph import graphs

_TAG = "recompute"  # torch's own, by which checkpoints tell the same; it comes through differentiation


def _tag_in(gm: GraphModule) -> int:
    backward = computed_from_gradients(gm)
    returned = set(gm.graph.output_node().all_input_nodes)
    casts = [node for node in gm.graph.nodes if _widens(node) and node not in backward | returned]
    return sum(_tag(cast) for cast in casts if any(user in backward for user in _readers(cast)))


def _tag(cast: Node) -> bool:
    tagged = _TAG not in cast.meta  # in a checkpoint that is settled
    cast.meta.setdefault(_TAG, CheckpointPolicy.PREFER_RECOMPUTE)
    source = base_of(cast.args[0])
    if has(source.target, CONVERSIONS_AFTER) and base_of(source.args[0]).op == "placeholder":
        source.meta.setdefault(_TAG, CheckpointPolicy.MUST_SAVE)
    return tagged


def _widens(node: Node) -> bool:
    if not has(node.target, CONVERSIONS_AFTER):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    if base_of(node.args[0]).op == "placeholder" or not is_float_tensor(before):
        return False
    return after.itemsize > before.itemsize and is_lossless(before.dtype, after.dtype)


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a value, views of it included."""
    for user in node.users:
        yield user
        if is_view(user.target):
            yield from _readers(user)


@dataclass(frozen=True)
class RecomputeCasts:
    """Tags the widening casts of a joint graph that backward reads; returns how many. An inference graph has none."""

    name = "recompute_casts"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        return sum(map(_tag_in, graphs(gm)))
