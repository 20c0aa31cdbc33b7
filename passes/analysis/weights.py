"""Tell which inputs of a graph are weights, and which of these can have copies that live across calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.passes.graph import placeholders
from ampcompile.sharding.weight import ShardedWeight
from ampcompile.torch_private import dynamo, storages, tracing
from ampcompile.weights.spec import hoistable


def find_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[Node, Any]:
    """Return the inputs that are parameters, or that Dynamo marked as static: buffers, tensors held by attributes."""
    return {
        node: value
        for node, value in zip(placeholders(gm), example_inputs, strict=True)
        if isinstance(value, torch.nn.Parameter) or dynamo.is_static(node)
    }


def find_copied_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[Node, bool]:
    """Return the weights whose copies can live across calls; True for those on trial, see `CopySpec`.

    A tensor whose sizes are symbols changes its layout from call to call, so it is cast in the graph. On a GPU so is a
    tensor that is neither parameter nor registered buffer: the host would have to wait to learn if it was refilled.
    """
    copied, gathered = {}, storages.gathered_by_fsdp()
    for node, value in find_weights(gm, example_inputs).items():
        trial = not isinstance(value, torch.nn.Parameter) and not dynamo.is_registered(node)
        if (
            not (trial and value.is_cuda)
            and tracing.is_of_fixed_layout(node.meta["val"])
            and hoistable(value, gathered)
        ):
            copied[node] = trial
    return copied


def find_gathered_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[Node, bool]:
    """Return the weights that FSDP gathers under a shard policy; True for those that may be gathered in fp8."""
    return {
        node: value.gathering.fp8
        for node, value in find_weights(gm, example_inputs).items()
        if type(value) is ShardedWeight and tracing.is_of_fixed_layout(node.meta["val"])
    }
