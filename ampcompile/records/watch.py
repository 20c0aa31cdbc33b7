"""Follow the casts of one graph from pass to pass, also those that a pass removes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile.dtypes import short_name
from ampcompile.passes.analysis.op_traits import PRODUCTS_AFTER, has
from ampcompile.passes.analysis.weights import find_weights
from ampcompile.passes.base import Applied, Pass
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.graph import UNDECIDED, decision_of, graphs
from ampcompile.torch_private import autocast, dynamo_attempts

from .casts import CastRecord, GraphRecord, OpRecord, casts_of, fusions_of, inserted_casts, ops_of
from .graph import NodeRecord, nodes_of
from .totals import JOINT, JointCast, Total, joint_casts, total_of


class Watcher:
    """Records a graph after each pass: pass its `watch` to `rewrite`. `example_inputs` are the graph's."""

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        self.example_inputs = example_inputs
        self.precision = _precision(example_inputs)
        self.casts: dict[int, CastRecord] = {}
        self.ops: tuple[OpRecord, ...] = ()
        self.nodes: tuple[NodeRecord, ...] = ()
        self.totals: list[Total] = []
        self._present: set[int] = set()  # numbers of the casts that the graph still contains

    def watch(self, done: Pass | None, gm: GraphModule) -> None:
        """Record the captured graph after a pass."""
        if done is None or UNDECIDED in gm.meta:  # no casts are inserted yet
            return
        self.totals.append(total_of(done.name, gm))
        if isinstance(done, InsertCasts):
            self.ops = tuple(ops_of(gm))
            self.nodes = tuple(nodes_of(gm))
            self.casts = dict(casts_of(gm, set(find_weights(gm, self.example_inputs))))
            self._present = set(self.casts)
            return
        fates = {cast.number: cast.fate for graph in graphs(gm) for _, cast in inserted_casts(graph)}
        for number in self._present:
            record = self.casts[number]
            removed = (*record.fate, done.fate) if done.fate else record.fate
            self.casts[number] = replace(record, fate=fates.get(number, removed))
        self._present &= fates.keys()

    def record(
        self, original: GraphModule, rewritten: GraphModule, history: Sequence[Applied], left: str = ""
    ) -> GraphRecord:
        """The record of the graph that Dynamo gave as `original`. Call it before lowering, which changes the graph.

        `left`: why the graph is left to autocast; empty if it isn't.
        """
        broken = getattr(original, "compile_subgraph_reason", None)
        reason = dynamo_attempts.in_short(broken.reason, broken.user_stack) if broken and broken.graph_break else ""
        return GraphRecord(
            precision=f"{self.precision}, left to autocast: {left}" if left else self.precision,
            left=bool(left),
            reason=reason,
            code=rewritten.print_readable(print_output=False),
            numbered_casts=self.casts,
            ops=self.ops,
            nodes=self.nodes,
            history=tuple(history),
            totals=tuple(self.totals),
            fusions=tuple(fusions_of(rewritten)),
        )


class JointWatcher:
    """Records a graph after differentiation, and after each later pass: pass its `watch` to `lower`."""

    def __init__(self) -> None:
        self.totals: list[Total] = []
        self.casts: tuple[JointCast, ...] = ()
        self.products = (0, 0)
        self.code = ""

    def watch(self, done: Pass | None, gm: GraphModule) -> None:
        """Record the joint graph after differentiation, or after a pass."""
        stage = f"differentiated: {JOINT}" if done is None else f"{done.name}, {JOINT}"
        self.totals.append(total_of(stage, gm))
        self.casts = tuple(joint_casts(gm))
        products = [node for graph in graphs(gm) for node in graph.graph.nodes if has(node.target, PRODUCTS_AFTER)]
        self.products = sum(decision_of(node).widened for node in products), len(products)
        self.code = gm.print_readable(print_output=False)


def _precision(example_inputs: Sequence[Any]) -> str:
    devices = sorted({v.device.type for v in example_inputs if isinstance(v, torch.Tensor)}) or ["cpu"]
    return ", ".join(
        f"{device} in {short_name(torch.get_autocast_dtype(device))}"
        if autocast.is_on(device)
        else f"{device} without autocast"
        for device in devices
    )
