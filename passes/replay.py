"""Prepare graphs that torch's own autograd differentiates as they run, for gradients of gradients.

Dynamo traces the backward of a custom autograd function with gradients off, as if it were never differentiated. If it
reads only the function's inputs, its outputs and the incoming gradients, it is enough to switch gradients on again.
Other values that forward computes and saves have no autograd history, so a second derivative would lack a term: such a
backward stays as it is, and `has_closed_backward` finds it.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.torch_private import autocast

from .base import EachGraph
from .graph import graphs
from .weight_copy import WEIGHT_COPY, read_copy

APPLY = torch.ops.higher_order.autograd_function_apply
SWITCH = autocast.SET_GRAD_ENABLED


def _switches(backward: GraphModule) -> list[Node]:
    """The nodes around a traced backward that switch gradients off and on again."""
    nodes = [node for node in backward.graph.nodes if node.op not in ("placeholder", "output")]
    around = [nodes[0], nodes[-1]] if nodes else []
    return around if [(node.target, node.args) for node in around] == [(SWITCH, (False,)), (SWITCH, (True,))] else []


def _bodies(call: Node) -> tuple[GraphModule, GraphModule]:
    owner: Any = call.graph.owning_module
    forward, backward = call.args[:2]
    return getattr(owner, forward.target), getattr(owner, backward.target)


def _saves_its_own_values(call: Node) -> bool:
    forward, _ = _bodies(call)
    outputs, saved = forward.graph.output_node().args[0]
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    if all(user.target is operator.getitem for user in call.users):  # torch 2.11 also lists unread values
        outputs = [outputs[user.args[1]] for user in call.users if user.users]
    return any(value.op != "placeholder" and value not in outputs for value in saved if isinstance(value, Node))


def has_closed_backward(gm: GraphModule) -> bool:
    """True if a custom function in a graph or its bodies has a backward that can't be differentiated."""
    calls = (call for graph in graphs(gm) for call in graph.graph.find_nodes(op="call_function", target=APPLY))
    return any(_switches(_bodies(call)[1]) for call in calls)


@dataclass(frozen=True)
class EnableSecondBackward(EachGraph):
    """Returns the number of custom functions whose backwards were made differentiable."""

    name = "enable_second_backward"

    def rewrite(self, gm: GraphModule) -> int:
        opened = 0
        for call in gm.graph.find_nodes(op="call_function", target=APPLY):
            _, backward = _bodies(call)
            switches = _switches(backward)
            if switches and not _saves_its_own_values(call):
                for node in switches:
                    backward.graph.erase_node(node)
                opened += 1
        return opened


@dataclass(frozen=True)
class BindWeightsEagerly(EachGraph):
    """Makes reads of copies differentiable twice; returns their number.

    Also turns nested compile regions into plain calls: their op differentiates itself on fake tensors only.
    """

    name = "bind_weights_eagerly"

    def rewrite(self, gm: GraphModule) -> int:
        reads = gm.graph.find_nodes(op="call_function", target=WEIGHT_COPY)
        for node in reads:
            node.target = read_copy
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
            body, _, *operands = node.args
            node.op, node.target, node.args = "call_module", body.target, tuple(operands)
        return len(reads)
