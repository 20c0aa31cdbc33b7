"""How each higher-order op calls its bodies: which arguments are graphs and what each is given.

Higher-order ops stay calls and their bodies are rewritten too. A kind that is not in `CALLS` is outlined and left
to the dispatcher's own autocast (`passes.opaque`), never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

HOPS = torch.ops.higher_order
Inputs = Callable[[tuple[Any, ...], dict[str, Any], list[Any]], list[Any]]


@dataclass(frozen=True)
class Body:
    """One graph argument: its path in the op's arguments, its inputs, whether autocast acts inside.

    `inputs(args, kwargs, outputs)` also sees the outputs of the bodies before it.
    """

    path: tuple[int, ...]
    inputs: Inputs
    autocast: bool = True


def _backward_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]) -> list[Any]:
    out, saved = outputs[0]
    outs = list(out) if isinstance(out, tuple | list) else [out]
    return [o.detach() if isinstance(o, torch.Tensor) else o for o in outs] + list(saved)


def _score_inputs(other: int, score: bool) -> Inputs:
    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]) -> list[Any]:
        query = args[0]
        indices = [query.new_empty((), dtype=torch.int32) for _ in range(4)]
        return ([query.new_empty(())] if score else []) + indices + list(args[other] if len(args) > other else ())

    return inputs


# Which dtype flex_attention's operands get is a rule like any other op's; here only who calls what.
CALLS: dict[HigherOrderOperator, tuple[Body, ...]] = {
    HOPS.tag_activation_checkpoint: (Body((0,), lambda a, k, o: list(a[1:])),),
    HOPS.invoke_subgraph: (Body((0,), lambda a, k, o: list(a[2:])),),
    HOPS.autograd_function_apply: (
        Body((0,), lambda a, k, o: list(a[2:])),
        Body((1,), _backward_inputs, autocast=False),  # eager runs a backward outside the region
    ),
    HOPS.cond: (Body((1,), lambda a, k, o: list(a[3])), Body((2,), lambda a, k, o: list(a[3]))),
    HOPS.while_loop: (
        Body((0,), lambda a, k, o: [*a[2], *a[3]]),
        Body((1,), lambda a, k, o: [*a[2], *a[3]]),
    ),
    HOPS.flex_attention: (
        Body((3,), _score_inputs(7, score=True), autocast=False),
        Body((4, -1), _score_inputs(8, score=False), autocast=False),
    ),
    HOPS.triton_kernel_wrapper_mutation: (),
    HOPS.triton_kernel_wrapper_functional: (),
}


def is_graph(value: Any) -> bool:
    """Whether an argument is a body (pytree leaf test)."""
    return isinstance(value, GraphModule)


def body_at(args: tuple[Any, ...], path: tuple[int, ...]) -> Any:
    """The argument at a body's path; None if the call has none there."""
    value: Any = args
    for index in path:
        if not isinstance(value, tuple | list) or not -len(value) <= index < len(value):
            return None
        value = value[index]
    return value


def known(hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every graph among the arguments is at a place `CALLS` describes."""
    if hop not in CALLS:
        return False
    listed = [body_at(args, body.path) for body in CALLS[hop]]
    graphs = [leaf for leaf in pytree.tree_leaves((args, kwargs), is_leaf=is_graph) if is_graph(leaf)]
    return all(any(graph is other for other in listed) for graph in graphs)


def each_body(hop: HigherOrderOperator, args: tuple[Any, ...]) -> Iterator[tuple[Body, GraphModule]]:
    """The bodies of a call, in the order in which they run."""
    for body in CALLS[hop]:
        graph = body_at(args, body.path)
        if is_graph(graph):
            yield body, graph


def call_on_fakes(hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result of a call; ops that only tag or name their body are skipped over."""
    if hop is HOPS.tag_activation_checkpoint:
        return args[0](*args[1:])
    if hop is HOPS.invoke_subgraph:
        return args[0](*args[2:])
    with torch._C._DisableAutocast():
        return hop(*args, **kwargs)
