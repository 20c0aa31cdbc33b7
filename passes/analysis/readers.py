"""What computes a value and what reads it: where gradients flow, and where a value's magnitude costs least.

By these a pass knows which sums of gradients it must not change, and whether an op may have made numbers larger.
"""

import operator
from collections.abc import Container, Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.graph import op_name, placeholders
from ampcompile.torch_private import autocast, pytree
from ampcompile.torch_private.dispatcher import OpOverload

from .op_traits import CHOOSES_AFTER, CONVERSIONS_AFTER, COPIES_AFTER, PRODUCTS_AFTER, has, is_view

_KEEP_MAGNITUDE = CHOOSES_AFTER | CONVERSIONS_AFTER | COPIES_AFTER
_PRODUCTS = PRODUCTS_AFTER | {"ampcompile::fp8_linear"}  # which only Inductor takes apart


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
            if is_floating(node):
                recorded.add(node)
        elif enabled and not recorded.isdisjoint(node.all_input_nodes) and is_floating(node):
            recorded.add(node)
    return recorded


def computed_from_gradients(gm: GraphModule) -> set[Node]:
    """The backward part of a joint graph: the incoming gradients and all that depends on them."""
    backward = {node for node in placeholders(gm) if str(node.target).startswith("tangents")}
    for node in gm.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward


def is_floating(node: Node) -> bool:
    """True if a node's value is, or holds, a tensor of floating or complex numbers."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves)


def is_of_product(node: Node) -> bool:
    """True for a result of a product."""
    return has(producer(node).target, _PRODUCTS)


def producer(node: Node) -> Node:
    """The op of which a value is the result, or one of several."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def place_of_magnitude(value: Node, order: Mapping[Node, int], products: Sequence[Node]) -> Node:
    """Return the node before which the magnitude of a value is computed: after the product that first reads it.

    By then Inductor has decided where the reader's numbers are written. It computes a magnitude in a loop that it knows
    already, and that isn't far away. So its operands don't stay in memory for long, either.
    """
    first = min((order[reader] for reader in readers_of(value)), default=order[value])
    product = next((node for node in products if order[node] >= first), None)
    return value.graph.output_node() if product is None else product.next


def readers_of(value: Node) -> list[Node]:
    """The nodes that read a value, or a view of it."""
    views = [user for user in value.users if is_view(user.target)]
    return [user for user in value.users if user not in views] + [
        reader for view in views for reader in readers_of(view)
    ]


def original_op(node: Node, taken_apart: bool = False) -> str:
    """The name of a node's op as it was before Inductor took it apart; or, with `taken_apart`, as it is now."""
    original = node.meta.get("original_aten")
    return op_name(original if isinstance(original, OpOverload) and not taken_apart else node.target)


def operands_of(node: Node) -> list[Node]:
    """The tensors that an op reads; sizes aren't among them."""
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]


def origin(value: Node, watched: Container[Node]) -> Node:
    """The nearest watched value behind views, copies, casts and choices among numbers; if none, the one behind all."""
    while value not in watched and (is_view(value.target) or has(value.target, _KEEP_MAGNITUDE)):
        value = value.all_input_nodes[0]
    return value


def is_of_softmax(node: Node) -> bool:
    """True for `exp(x - x.amax())` and its share of a sum: at most 1, and never written to memory."""
    name, operands = op_name(node.target), node.all_input_nodes
    if name == "aten.div":
        return is_of_softmax(operands[0])
    if name != "aten.exp" or op_name(operands[0].target) != "aten.sub":
        return False
    return op_name(origin(operands[0].all_input_nodes[-1], ()).target) == "aten.amax"
