"""Follow the casts of one graph from pass to pass, also those that a pass takes away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from .report_records import CastRecord, OpRecord, cast_nodes, casts_of, ops_of

# What has become of a cast that is gone after a pass, by the verb in the pass's name.
_FATES = {"hoist": "hoisted", "share": "shared", "fold": "folded", "drop": "folded", "move": "moved", "fuse": "fused"}


@dataclass
class Watcher:
    """`weights(graph)` are the inputs that hold weights. Hand `Watcher.watch` to the pass runner."""

    weights: Callable[[GraphModule], set[Node]]
    casts: dict[int, CastRecord] = field(default_factory=dict)
    ops: tuple[OpRecord, ...] = ()

    def watch(self, name: str, gm: GraphModule) -> None:
        """Called after each pass."""
        if name == "insert_casts":
            self.ops = tuple(ops_of(gm))
            self.casts = dict(casts_of(gm, self.weights(gm)))
            return
        there = {node.meta["amp_cast"].number: node.meta["amp_cast"].fate for node in cast_nodes(gm)}
        word = _FATES.get(name.partition("_")[0])
        for number, record in self.casts.items():
            gone = (*record.fate, word) if word and word not in record.fate else record.fate
            self.casts[number] = replace(record, fate=there.get(number, gone))
