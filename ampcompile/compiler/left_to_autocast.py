"""Leave graphs that capture can't trace to autocast: they run as Dynamo made them, under the call's autocast state.

Capture traces plain tensors. Some tensor subclasses hold others and have rules of their own for every op: DTensor,
quantized weights. Stock torch.compile traces such a graph under autocast, whose casts are then part of it, forward and
backward. So does this module; only the choice of lowering and the float32 results are ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from ampcompile.config import Options
from ampcompile.errors import AmpWarning
from ampcompile.passes.graph import graphs
from ampcompile.policy import Policy
from ampcompile.torch_private import autocast, compiled_functions, lowering, pytree
from ampcompile.torch_private.types import is_traceable_wrapper_subclass

from .cache_key import cache_key
from .decompositions import decompositions
from .double_backward import SUBCLASSES, DoubleBackward

LEFT = "amp_left"  # in `gm.meta`, why a graph is left to autocast


def find_reason(gm: GraphModule) -> str:
    """The reason why a graph of Dynamo's is left to autocast; empty if it isn't."""
    names = sorted({type(value).__name__ for graph in graphs(gm) for value in _not_carried(graph)})
    return f"it computes with {', '.join(names)}, which ampcompile doesn't rewrite" if names else ""


def _not_carried(gm: GraphModule) -> Iterator[Any]:
    for node in gm.graph.nodes:
        # Capture traces nested tensors, but not the ops that make one from other tensors.
        carried = node.op == "placeholder" or any(v.is_nested for n in node.all_input_nodes for v in _subclasses(n))
        yield from (value for value in _subclasses(node) if not (value.is_nested and carried))


def _subclasses(node: Node) -> list[Any]:
    return [
        value for value in pytree.tree_leaves(node.meta.get("example_value")) if is_traceable_wrapper_subclass(value)
    ]


def warn_of_policy(reason: str, policy: Policy) -> None:
    """Warn that a graph doesn't follow the user's policy."""
    if policy != Policy():
        warnings.warn(
            f"found the policy {str(policy)!r} for a graph that is left to autocast, whose rules it follows instead: "
            f"{reason}. Put ampcompile.precision on the modules that are to run in another dtype.",
            AmpWarning,
            stacklevel=2,
        )


def lower_as_made(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Lower a graph of Dynamo's as stock torch.compile does, under the current autocast state; return the callable."""
    if options.lower == "eager":
        return gm
    with compiled_functions.functions_made() as functions:
        if options.lower == "aot_eager":
            compiled = lowering.aot_eager(gm, example_inputs, _leave)
        else:
            config = {"emulate_precision_casts": options.numerics == "eager", **lowering.config_for_bodies(gm)}
            # Autocast's dtypes are part of torch's own key only from 2.13 on.
            key = f"{cache_key(frozenset())} {autocast.autocast_states()}"
            compiled = lowering.inductor(
                gm, example_inputs, config | dict(options.inductor), _leave, key, decompositions()
            )
    if functions:
        DoubleBackward(gm, functions[-1], SUBCLASSES)  # which raises an error of ours
    return compiled


def _leave(_: GraphModule) -> None:
    """Change nothing in the graph after differentiation."""
