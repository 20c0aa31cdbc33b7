"""Act on the decisions: put a cast before every operand that needs one. The only pass that adds a rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from ampcompile import compat

from .graph import ENTER, EXIT, Cast, Decision, bodies, castable, op_name, set_arguments

CAST = torch.ops.aten.to.dtype
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "seq_nr", "custom")


def _cast_before(graph: Graph, node: Node, operand: Node, dtype: torch.dtype, because: str) -> Node:
    with graph.inserting_before(node):
        cast = graph.call_function(CAST, (operand, dtype))
    cast.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    cast.meta["val"] = operand.meta["val"].to(dtype)
    cast.meta["amp_cast"] = Cast(op_name(node.target), because)
    return cast


def _narrow_after(graph: Graph, node: Node, decision: Decision) -> None:
    """Cast the op's result; the op itself, computed wider, is seen by nobody else."""
    assert decision.narrow is not None
    with graph.inserting_after(node):
        cast = graph.call_function(CAST, (node, decision.narrow))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    cast.meta["val"] = decision.result
    cast.meta["amp_cast"] = Cast(op_name(node.target), f"{decision.because}; its result goes low again")


def _act(gm: GraphModule, done: set[int]) -> int:
    if id(gm) in done:
        return 0
    done.add(id(gm))
    graph, casts = gm.graph, 0
    for node in list(graph.nodes):
        decision: Decision = node.meta["amp"]
        new = {n: _cast_before(graph, node, n, dtype, decision.because) for n, dtype in decision.operands.items()}
        casts += len(new)
        if new:
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n, new=new: new.get(n, n))
        if decision.regions is not None:
            gm.get_submodule(str(node.target)).regions = decision.regions
        if decision.target is not None:
            node.target = decision.target
        if decision.arguments:
            node.args, node.kwargs = set_arguments(node.target, node.args, node.kwargs, decision.arguments)
        if node.op != "output" and not isinstance(decision.result, torch.nn.Module):
            node.meta["val"] = decision.result
        if decision.narrow is not None and castable(decision.result):
            with torch.no_grad():
                node.meta["val"] = decision.result.to(torch.float32)
            _narrow_after(graph, node, decision)
            casts += 1
    for node in reversed(list(graph.nodes)):
        if node.target is EXIT or node.target is ENTER:
            graph.erase_node(node)
    casts += sum(_act(body, done) for _, body in bodies(gm))
    gm.recompile()
    return casts


@dataclass(frozen=True)
class InsertCasts:
    """Returns the number of casts inserted, bodies of higher-order ops included. Regions end here: they are baked in."""

    name = "insert_casts"
    exact = False  # this is where mixed precision rounds

    def apply(self, gm: GraphModule) -> int:
        with compat.on_fakes_of(gm):
            return _act(gm, set())
