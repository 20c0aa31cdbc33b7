"""Carry out the decisions: insert a cast before every operand that needs one. The only pass that adds roundings."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from ampcompile.dtypes import short_name
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.higher_order import HOPS
from ampcompile.passes.analysis.op_traits import set_arguments
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import ENTER, EXIT, UNDECIDED, Cast, Decision, decision_of, is_castable, note, op_name
from ampcompile.torch_private import pytree

ATEN = torch.ops.aten
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "seq_nr", "custom")


@dataclass(frozen=True)
class InsertCasts(EachGraph):
    """Returns the number of casts inserted, bodies included. Also removes the autocast enter and exit nodes."""

    name = "insert_casts"
    exact = False  # these casts are the roundings of mixed precision

    def rewrite(self, gm: GraphModule) -> int:
        gm.meta.pop(UNDECIDED, None)
        casts = 0
        narrowed: dict[Node, Node] = {}  # the value that other ops read instead of a result
        for node in list(gm.graph.nodes):
            decision = decision_of(node)
            value = None if node.op == "output" or isinstance(decision.result, torch.nn.Module) else decision.result
            if value is not None and node not in narrowed:  # there it keeps the float32 that its cast reads
                node.meta["val"] = value
            casts += _change_operands(node, decision, narrowed)
            for attribute, body in decision.bodies.items():
                _call_copy(gm, node, attribute, body)
            if decision.regions is not None:
                gm.get_submodule(str(node.target)).regions = decision.regions
            if decision.target is not None:
                node.target = decision.target
            if decision.arguments:
                node.args, node.kwargs = set_arguments(node.target, node.args, node.kwargs, decision.arguments)
            if decision.narrow is not None:
                casts += _narrow_results(node, decision, decision.narrow, narrowed)
        for node in reversed(list(gm.graph.nodes)):
            if node.target is EXIT or node.target is ENTER:
                gm.graph.erase_node(node)
        return casts


def _change_operands(node: Node, decision: Decision, narrowed: Mapping[Node, Node]) -> int:
    changed: dict[Node, Node] = {}
    casts = 0
    for operand, largest in decision.clamps.items():
        operand = narrowed.get(operand, operand)
        changed[operand] = _clamp(node, operand, largest)
    wanted = {narrowed.get(operand, operand): dtype for operand, dtype in decision.operands.items()}

    def cast(operand: Node) -> Node:
        """Insert one cast per use of an operand, so that the gradients of `x @ x` are summed in x's type."""
        nonlocal casts
        value = changed.get(operand, operand)
        if operand not in wanted:
            return value
        casts += 1
        with node.graph.inserting_before(node):
            return _cast(node, value, wanted[operand], decision.because)

    if changed or wanted:
        node.args, node.kwargs = map_arg((node.args, node.kwargs), cast)
    return casts


def _clamp(node: Node, operand: Node, largest: float) -> Node:
    """Clamp what is finite in a constant that an op reads."""
    value = operand.meta["val"]
    with node.graph.inserting_before(node):
        infinite = node.graph.call_function(ATEN.isinf.default, (operand,))
        clamped = node.graph.call_function(ATEN.clamp.default, (operand, -largest, largest))
        chosen = node.graph.call_function(ATEN.where.self, (infinite, operand, clamped))
    for made in (infinite, clamped, chosen):
        made.meta = {**_origin(node), "val": value.to(torch.bool) if made is infinite else value}
    return chosen


def _narrow_results(node: Node, decision: Decision, dtype: torch.dtype, narrowed: dict[Node, Node]) -> int:
    """Cast an op's results to `dtype`; only these casts read the float32 that the op itself computes."""
    several = isinstance(decision.result, tuple | list)
    results = [user for user in node.users if user.target is operator.getitem] if several else [node]
    node.meta["val"] = pytree.tree_map(lambda v: v.float() if is_castable(v) else v, decision.result)
    results = [r for r in results if is_castable(decision_of(r).result)]
    for result in results:
        decided = decision_of(result)
        if several:
            result.meta["val"] = decided.result.float()
        with node.graph.inserting_after(result):
            cast = _cast(result, result, dtype, "")
        result.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        cast.args = (result, dtype)
        cast.meta["val"] = decided.result
        narrowed[result] = cast
        note(cast, cast=Cast(op_name(node.target), f"{decision.because}; its result goes low again"))
    return len(results)


def _cast(node: Node, operand: Node, dtype: torch.dtype, because: str) -> Node:
    # Inductor's generated code lists the node's name beside the kernel that the cast is fused into.
    cast = node.graph.create_node("call_function", CAST, (operand, dtype), name=f"amp_cast_{short_name(dtype)}")
    cast.meta = _origin(node)
    cast.meta["val"] = operand.meta["val"].to(dtype)
    note(cast, cast=Cast(op_name(node.target), because))
    return cast


def _origin(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _KEPT_META if key in node.meta}


def _call_copy(gm: GraphModule, node: Node, attribute: Node, body: GraphModule) -> None:
    """Call a copy of a body, because other calls of it, with other dtypes, keep the original."""
    name = next(name for i in count() if getattr(gm, name := f"{attribute.target}_{i}", body) is body)
    setattr(gm, name, body)
    with gm.graph.inserting_before(node):
        copied = gm.graph.get_attr(name)
    copied.meta = dict(attribute.meta)
    node.replace_input_with(attribute, copied)
    if node.target is HOPS.invoke_subgraph:  # torch's caches know it by its second argument
        node.update_arg(1, f"{node.args[1]}_{name}")
