"""Which values of a graph share memory, which memory is written in the graph, and which the outside can see."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.graph import below_autograd, bodies, placeholders
from ampcompile.torch_private import dispatcher
from ampcompile.torch_private.types import HigherOrderOperator, OpOverload

from .op_traits import CASTS, has

# Composite ops that give memory of their own, though their schema could as well be silent about an alias.
_FRESH_NAMES = """
linear matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm batch_norm
group_norm instance_norm rms_norm softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd embedding cat concat
scaled_dot_product_attention gelu silu max_pool1d max_pool2d max_pool3d avg_pool1d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d
"""
_FRESH = frozenset(f"aten::{name}" for name in _FRESH_NAMES.split())


class Memory:
    """The memory of one graph's values, looked at once; nodes added later are their own."""

    def __init__(self, graph: Graph) -> None:
        self._group: dict[Node, Node] = {}
        self._written: set[Node] = set()
        self._outside: set[Node] = set()
        inner = {attribute: _writes(body) for attribute, body in bodies(graph.owning_module)}
        for node in graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                self._outside.update((node, *node.all_input_nodes))
            elif node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
                writes = any(inner.get(operand, False) for operand in node.all_input_nodes)
                self._hand_over(node, writes or not any(operand in inner for operand in node.all_input_nodes))
            elif isinstance(node.target, OpOverload):
                self._op(node, node.target)
            elif node.target is operator.getitem or below_autograd(node.target):
                self._join(node, node.args[0])
        self._written = {self._of(node) for node in self._written}
        self._outside = {self._of(node) for node in self._outside}

    def is_written(self, node: Node) -> bool:
        """Whether some op writes into a value's memory, before or after it is computed."""
        return self._of(node) in self._written

    def is_seen(self, node: Node) -> bool:
        """Whether a value shares memory with an input, a constant or a result of the graph."""
        return self._of(node) in self._outside

    def _hand_over(self, node: Node, writes: bool) -> None:
        """A call that may return what it is given, and write into it."""
        for operand in node.all_input_nodes:
            self._join(node, operand)
            if writes:
                self._written.add(operand)

    def _op(self, node: Node, op: OpOverload) -> None:
        if has(op, CASTS) and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            return  # `to` returns its operand only where it has nothing to do
        silent = dispatcher.may_return_argument(op) and op._schema.name not in _FRESH
        for i, argument in enumerate(op._schema.arguments):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            alias = argument.alias_info
            for operand in given if isinstance(given, list | tuple) else (given,):
                if isinstance(operand, Node):
                    if alias is not None or silent:
                        self._join(node, operand)
                    if alias is not None and alias.is_write:
                        self._written.add(operand)

    def _join(self, node: Node, other: Any) -> None:
        if isinstance(other, Node):
            self._group[self._of(node)] = self._of(other)

    def _of(self, node: Node) -> Node:
        root = node
        while (above := self._group.get(root, root)) is not root:
            root = above
        while node is not root:
            node, self._group[node] = self._group.get(node, node), root
        return root


def written_below_autograd(gm: GraphModule) -> list[int]:
    """The inputs, no copies of weights, that may be written through `.data` or given other data: no version tells."""
    if not _reads_data(gm):
        return []
    memory = Memory(gm.graph)
    return [i for i, n in enumerate(placeholders(gm)) if "amp_copy" not in n.meta and memory.is_written(n)]


def overwritten(graph: Graph) -> set[Node]:
    """The inputs that a graph after differentiation writes to, as it does at its end."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {write.args[0] for write in writes if write.args[0].op == "placeholder"}


def behind_views(value: Node) -> Node:
    """The value that a view, or a view of a view, is of; another value itself."""
    while _is_part(value) and isinstance(value.args[0], Node):
        value = value.args[0]
    return value


def _is_part(value: Node) -> bool:
    return value.target is operator.getitem or (isinstance(value.target, OpOverload) and value.target.is_view)


def returned(graph: Graph) -> set[Node]:
    """The values that a graph returns, and those that it returns views of."""
    found: set[Node] = set()
    for value in graph.output_node().all_input_nodes:
        found.update((value, behind_views(value)))
    return found


def _reads_data(gm: GraphModule) -> bool:
    return any(below_autograd(node.target) for node in gm.graph.nodes) or any(_reads_data(b) for _, b in bodies(gm))


def _writes(body: GraphModule) -> bool:
    """Whether anything in a body, or in the bodies it calls, writes into memory."""
    return any(
        node.op == "call_module" or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable)
        for node in body.graph.nodes
    ) or any(_writes(inner) for _, inner in bodies(body))
