"""Find the values of a graph through which gradients may flow: there passes must not change sums of gradients."""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.graph import placeholders
from ampcompile.torch_private import autocast, pytree


def recorded_by_autograd(graph: Graph, enabled: bool) -> set[Node]:
    """The values that autograd may record; `enabled`: whether grad mode is on where the graph is called.

    Floating inputs are assumed to want a gradient.
    """
    recorded: set[Node] = set()
    outer: list[bool] = []
    for node in graph.nodes:
        if node.target is autocast.SET_GRAD_ENABLED:
            enabled = bool(node.args[0])
        elif node.target is autocast.ENTER_INFERENCE:
            outer.append(enabled)
            enabled = enabled and not node.args[0]
        elif node.target is autocast.EXIT_INFERENCE:
            enabled = outer.pop()
        elif node.op == "placeholder":
            if _is_floating(node.meta.get("val")):
                recorded.add(node)
        elif enabled and not recorded.isdisjoint(node.all_input_nodes) and _is_floating(node.meta.get("val")):
            recorded.add(node)
    return recorded


def computed_from_gradients(gm: GraphModule) -> set[Node]:
    """The backward part of a joint graph: the incoming gradients and all that depends on them."""
    backward = {node for node in placeholders(gm) if str(node.target).startswith("tangents")}
    for node in gm.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward


def _is_floating(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves)
