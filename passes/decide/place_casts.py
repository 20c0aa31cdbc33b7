"""Place the ops that may run in either type where the fewest bytes are cast: a minimum cut of the graph.

Float32 is the source's side of the cut and the low type the sink's. What a rule decided, and what is visible outside,
has its side; the free ops between go where the cut puts them. An edge costs the bytes that its cast reads and writes,
forward once for all readers of a value and backward once for each, because gradients are added up in the value's own
type. Where nothing is saved an op stays where eager autocast has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW, short_name
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import classify_movement
from ampcompile.passes.analysis.gradients import recorded_by_autograd
from ampcompile.passes.analysis.op_traits import is_elementwise
from ampcompile.passes.analysis.schema import writes
from ampcompile.passes.analysis.sizes import elements, elements_hint, is_float_tensor
from ampcompile.passes.graph import Decision, PlacementWish, placeholders
from ampcompile.rules.table import table
from ampcompile.torch_private import pytree
from ampcompile.torch_private.types import OpOverload

from .minimum_cut import source_side

HIGH = torch.float32
CUTS = 64
"""How many cuts are tried at most; most graphs need one."""


@dataclass
class Placement:
    """One graph's ops and what their casts cost. `low`: the type of the sink's side."""

    gm: GraphModule
    low: torch.dtype
    weights: set[Node]
    recorded: set[Node]
    fuses: bool
    free: dict[Node, torch.dtype] = field(default_factory=dict)
    """The free ops, with the type that eager autocast has them in."""

    def side(self, node: Node, labels: Mapping[Node, torch.dtype]) -> torch.dtype:
        """The type that a value is in."""
        return labels.get(node) or node.meta["amp"].result.dtype

    def wants(self, user: Node, operand: Node, labels: Mapping[Node, torch.dtype]) -> torch.dtype:
        """The type in which an op takes an operand."""
        if user in self.free:
            return labels[user]
        decision: Decision = user.meta["amp"]
        return decision.operands.get(operand) or self.side(operand, {})

    def widens_inside(self, user: Node) -> bool:
        """Whether a kernel in float32 takes some operands as they are, since another one is in float32."""
        return self.free.get(user) == HIGH and len(_floating_operands(user)) > 1

    def forward(self, operand: Node, user: Node) -> int:
        """Bytes of a cast between two ops in different types, 0 where it is part of both ops' kernel."""
        return 0 if operand in self.weights or self._in_one_kernel(operand, user) else self.bytes(operand)

    def backward(self, operand: Node, user: Node) -> int:
        """Bytes of the casts of its gradients, one for each place where the op reads it."""
        if self._in_one_kernel(operand, user) or not self.recorded.issuperset((operand, user)):
            return 0
        return self.bytes(operand) * pytree.arg_tree_leaves(*user.args, **user.kwargs).count(operand)

    def _in_one_kernel(self, operand: Node, user: Node) -> bool:
        return self.fuses and is_elementwise(operand.target) and is_elementwise(user.target)

    def bytes(self, operand: Node) -> int:
        """Bytes that a cast of a value reads and writes."""
        return (elements_hint(operand.meta["amp"].result) or 0) * (HIGH.itemsize + self.low.itemsize)

    def edges(self) -> list[tuple[Node, Node]]:
        """Every value that has one of the two types, with every op that reads it."""
        return [
            (operand, user)
            for operand in self.gm.graph.nodes
            if is_float_tensor(operand.meta["amp"].result)
            for user in operand.users
            if user.op == "call_function" and isinstance(user.target, OpOverload)
        ]

    def cost(self, labels: Mapping[Node, torch.dtype]) -> int:
        """Bytes cast, forward and backward, if the free ops run in these types."""
        total, paid = 0, set[tuple[Node, torch.dtype]]()
        for operand, user in self.edges():
            wanted = self.wants(user, operand, labels)
            if wanted == self.side(operand, labels):
                continue
            total += self.backward(operand, user)
            inside = wanted == HIGH and self.widens_inside(user)
            if not inside and (cast := self.forward(operand, user)) and (operand, wanted) not in paid:
                paid.add((operand, wanted))
                total += cast
        return total

    def cut(self) -> dict[Node, torch.dtype]:
        """The types of the free ops that cast the fewest bytes.

        An op in float32 that is to widen its operands itself needs one that is wide, which no cut can ask for. Where it
        has none, the op goes to the other side, or an operand to this one, and the rest is cut again: `CUTS` times.
        """
        best = self._narrow_where_nothing_is_wide(dict(self.free))
        pending: list[dict[Node, torch.dtype]] = [{}]
        for _ in range(CUTS):
            if not pending:
                break
            fixed = pending.pop()
            labels = self._cut_with(fixed)
            possible = self._narrow_where_nothing_is_wide(dict(labels))
            if not fixed or self.cost(possible) < self.cost(best):
                best = possible
            if self.cost(labels) >= self.cost(best):
                continue
            node = next(node for node in labels if labels[node] != possible[node])
            operands = [n for n in _floating_operands(node) if n in self.free and n not in fixed]
            pending += [fixed | {operand: HIGH} for operand in operands] + [fixed | {node: self.low}]
        return best

    def _cut_with(self, fixed: Mapping[Node, torch.dtype]) -> dict[Node, torch.dtype]:
        """The minimum cut, some ops being on a given side."""
        capacities: dict[tuple[Any, Any], float] = {}
        weight = len(self.free) + 1  # one byte is worth more than all ops staying where they are

        def terminal(node: Node) -> Any:
            return node if node in self.free else self.side(node, {})

        def add(a: Any, b: Any, capacity: float) -> None:
            if a != b:
                capacities[a, b] = capacities.get((a, b), 0) + capacity

        for operand, user in self.edges():
            source = terminal(operand)
            reader = user if user in self.free else self.wants(user, operand, {})
            if source == reader:
                continue
            back, forth = weight * self.backward(operand, user), weight * self.forward(operand, user)
            if {operand, user} & self.free.keys():  # else it is paid anyway; of a cast forward all readers have a use
                add(source, reader, back)
                add(reader, source, back)
            if forth:  # one cast down for all readers, one up
                capacities[source, (operand, self.low)] = forth
                capacities[(operand, self.low), reader] = inf
                if not self.widens_inside(user):
                    capacities[(operand, HIGH), source] = forth
                    capacities[reader, (operand, HIGH)] = inf
        for node, eager in self.free.items():
            edge = (HIGH, node) if eager == HIGH else (node, self.low)
            add(edge[0], edge[1], 1)
        for node, label in fixed.items():
            edge = (HIGH, node) if label == HIGH else (node, self.low)
            add(edge[0], edge[1], inf)
        high = source_side(capacities, HIGH, self.low)
        return {node: HIGH if node in high else self.low for node in self.free}

    def _narrow_where_nothing_is_wide(self, labels: dict[Node, torch.dtype]) -> dict[Node, torch.dtype]:
        """Without the ops in float32 that were to widen their operands themselves, but have none in float32."""
        for node in labels:
            wide = any(self.side(n, labels) == HIGH for n in _floating_operands(node))
            if labels[node] == HIGH and self.widens_inside(node) and not wide:
                labels[node] = self.low
        return labels


@dataclass(frozen=True)
class PlaceCasts:
    """`gradients`: grad mode is on around the graph. `fuses`: Inductor runs it, where casts between elementwise ops
    cost nothing. `is_weight(index, placeholder)`: its cast is kept between calls.

    Writes `node.meta["amp_placed"]` for `assign_precision`, which runs again. Returns the number of ops placed
    elsewhere than eager autocast has them.
    """

    gradients: bool
    fuses: bool
    is_weight: Callable[[int, Node], bool]
    name = "place_casts"
    exact = False  # ops in another type round differently
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        placement = self.placement(gm)
        if placement is None or not placement.free:
            return 0
        labels = placement.cut()
        moved = {node for node, label in labels.items() if label != placement.free[node]}
        for node in moved | {user for other in moved for user in other.users}:
            if operands := _operands(placement, node, labels):
                node.meta["amp_placed"] = PlacementWish(operands, _because(placement, node, labels))
        return len(moved)

    def placement(self, gm: GraphModule) -> Placement | None:
        """What there is to place in a graph whose precision is assigned; None if no op was given a low type."""
        decisions: list[Decision] = [node.meta["amp"] for node in gm.graph.nodes]
        found = {dtype for decision in decisions for dtype in decision.operands.values()} & set(LOW)
        if len(found) != 1:
            return None
        weights = {node for i, node in enumerate(placeholders(gm)) if self.is_weight(i, node)}
        placement = Placement(gm, found.pop(), weights, recorded_by_autograd(gm.graph, self.gradients), self.fuses)
        memory = Aliases(gm.graph)
        for node in gm.graph.nodes:
            if _is_free(node, placement.low, memory):
                placement.free[node] = node.meta["amp"].result.dtype
        return placement


def _is_free(node: Node, low: torch.dtype, memory: Aliases) -> bool:
    op, decision = node.target, node.meta["amp"]
    if not isinstance(op, OpOverload) or writes(op) or not decision.known or decision.arguments:
        return False
    result = decision.result
    if not is_float_tensor(result) or result.dtype not in (HIGH, low) or elements_hint(result) is None:
        return False
    # An accelerator's list says which ops lose digits in 16 bits; what the CPU has no rule for is not free of that.
    if decision.operands or not decision.free or op.name() in table("cuda") or op.name() in table(result.device.type):
        return False
    operands = [n.meta["amp"].result for n in node.all_input_nodes]
    if not (is_elementwise(node.target) or classify_movement(node)) or any(
        isinstance(v, torch.Tensor) and v.is_floating_point() and v.dtype not in (HIGH, low) for v in operands
    ):
        return False
    ops_alone = all(user.op == "call_function" and isinstance(user.target, OpOverload) for user in node.users)
    return ops_alone and bool(operands) and not memory.is_written(node) and not memory.is_visible_outside(node)


def _floating_operands(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if is_float_tensor(n.meta["amp"].result)]


def _operands(placement: Placement, node: Node, labels: Mapping[Node, torch.dtype]) -> dict[Node, torch.dtype]:
    if node not in placement.free and node.meta["amp"].operands:
        return {}  # its rule casts what arrives
    values = _floating_operands(node)
    wide = any(placement.side(n, labels) == HIGH for n in values)
    if labels.get(node) == HIGH and placement.widens_inside(node) and wide:
        return {}
    return {n: placement.wants(node, n, labels) for n in values}


def _because(placement: Placement, node: Node, labels: Mapping[Node, torch.dtype]) -> str:
    if node not in labels:
        return "as in eager autocast, though what it reads was placed elsewhere"
    size = elements(node.meta["amp"].result) * (HIGH.itemsize + placement.low.itemsize)
    return f"placed in {short_name(labels[node])} by a minimum cut over bytes cast; a cast of it costs {size}"
