"""After differentiation, on the CPU: the gradient of an embedding is added to the weight's other gradient in place."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ampcompile.kernels.embedding_gradient import ADD_EMBEDDING_GRADIENT
from ampcompile.torch_private.dispatcher import AS_A_FUNCTION
from ampcompile.torch_private.types import OpOverload

_GRADIENT = torch.ops.aten.embedding_dense_backward.default


def _find_other_term(gradient: Node) -> Node | None:
    """The other term of a sum, if it may be written over and the gradient is used for nothing else."""
    scale_grad_by_freq = gradient.args[4]
    total = next(iter(gradient.users), None)
    if (
        total is None
        or len(gradient.users) > 1
        or total.target is not torch.ops.aten.add.Tensor
        or total.kwargs
        or scale_grad_by_freq
    ):
        return None
    other = total.args[0] if total.args[1] is gradient else total.args[1]
    return other if other is not gradient and _is_fresh(other) and _match(other, gradient) else None


def _is_fresh(value: object) -> bool:
    """Whether a node computes a tensor of its own, for one reader."""
    if not isinstance(value, Node) or len(value.users) > 1:
        return False
    if value.target is operator.getitem:
        return ADD_EMBEDDING_GRADIENT in value.args[0].args  # another embedding's gradient is added there
    return isinstance(value.target, OpOverload) and not value.target.is_view and value.meta["val"].is_contiguous()


def _match(a: Node, b: Node) -> bool:
    a, b = a.meta["val"], b.meta["val"]
    return a.device.type == "cpu" and (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)


def _replace(graph: Graph, gradient: Node, other: Node) -> None:
    (total,) = gradient.users
    grad, indices, _, padding_idx, _ = gradient.args
    with graph.inserting_before(total):
        kwargs = {"x": other, "grad": grad, "indices": indices, "padding_idx": padding_idx}
        added = graph.call_function(AS_A_FUNCTION, (ADD_EMBEDDING_GRADIENT,), kwargs)
        result = graph.call_function(operator.getitem, (added, 1))
    added.meta = {**total.meta, "val": (None, total.meta["val"])}
    result.meta = dict(total.meta)
    total.replace_all_uses_with(result)
    graph.erase_node(total)
    graph.erase_node(gradient)


@dataclass(frozen=True)
class AddEmbeddingGradients:
    """For a joint graph; an inference graph has no gradients. Returns the sums that are taken in place.

    Inductor lets the op write over its operand, as nothing else reads it.
    """

    name = "add_embedding_gradients"
    exact = False  # its rows are added to the other gradient one by one, not to each other first
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        replaced = 0
        for gradient in gm.graph.find_nodes(op="call_function", target=_GRADIENT):
            if (other := _find_other_term(gradient)) is not None:
                _replace(gm.graph, gradient, other)
                replaced += 1
        return replaced
