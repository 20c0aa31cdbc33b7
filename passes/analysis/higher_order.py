"""The calling convention of each higher-order op: its graph arguments, their inputs, the outputs they must return.

Higher-order ops stay calls and their bodies are rewritten too. A kind that is not in `CALLS` is outlined and left
to the dispatcher's own autocast (`passes.capture.outline`), never dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile.dtypes import FLOATS, widest
from ampcompile.passes.graph import to_dtype
from ampcompile.torch_private import pytree, tracing
from ampcompile.torch_private.dispatcher import HigherOrderOperator

HOPS = tracing.HOPS
Inputs = Callable[[tuple[Any, ...], list[Any]], list[Any]]


@dataclass(frozen=True)
class Body:
    """One graph argument of an op: its path in the arguments, its inputs, and `autocast` if autocast acts inside.

    `inputs(args, outputs)` also gets the outputs of the bodies before it. `mode()` is a context in which the
    body is captured.
    """

    path: tuple[int, ...]
    inputs: Inputs
    autocast: bool = True
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext


def _backward_inputs(args: tuple[Any, ...], outputs: list[Any]) -> list[Any]:
    out, saved = outputs[0]
    outs = list(out) if isinstance(out, tuple | list) else [out]
    return [o.detach() if isinstance(o, torch.Tensor) else None for o in outs] + list(saved)


def _score_inputs(other: int, score: bool) -> Inputs:
    def inputs(args: tuple[Any, ...], outputs: list[Any]) -> list[Any]:
        query = args[0]
        indices = [query.new_empty((), dtype=torch.int32) for _ in range(4)]
        return ([query.new_empty(())] if score else []) + indices + list(args[other] if len(args) > other else ())

    return inputs


# This table lists calls only: `assign_precision` decides the dtypes of flex_attention's operands.
CALLS: dict[HigherOrderOperator, tuple[Body, ...]] = {
    HOPS.tag_activation_checkpoint: (Body((0,), lambda a, o: list(a[1:])),),
    HOPS.invoke_subgraph: (Body((0,), lambda a, o: list(a[2:])),),
    HOPS.autograd_function_apply: (
        Body((0,), lambda a, o: list(a[2:])),
        Body((1,), _backward_inputs, autocast=False),  # eager runs a backward outside the region
    ),
    HOPS.cond: (Body((1,), lambda a, o: list(a[3])), Body((2,), lambda a, o: list(a[3]))),
    HOPS.while_loop: (Body((0,), lambda a, o: [*a[2], *a[3]]), Body((1,), lambda a, o: [*a[2], *a[3]])),
    HOPS.flex_attention: (
        Body((3,), _score_inputs(7, score=True), autocast=False, mode=tracing.indexing_by_tensors),
        Body((4, -1), _score_inputs(8, score=False), autocast=False, mode=tracing.indexing_by_tensors),
    ),
    HOPS.wrap_with_set_grad_enabled: (Body((1,), lambda a, o: list(a[2:])),),
    HOPS.wrap_with_autocast: (Body((4,), lambda a, o: list(a[5:])),),  # capturing leaves none of them
    HOPS.triton_kernel_wrapper_mutation: (),
    HOPS.triton_kernel_wrapper_functional: (),
}


def is_graph(value: Any) -> bool:
    """True if an argument is a body (pytree leaf test)."""
    return isinstance(value, GraphModule)


def each_body(hop: HigherOrderOperator, args: tuple[Any, ...]) -> Iterator[tuple[Body, Any]]:
    """Yield the bodies of a call in the order in which they run, each with its argument in `args`."""
    for body in CALLS[hop]:
        value: Any = args
        for index in body.path:
            value = value[index] if -len(value) <= index < len(value) else None
        if value is not None:
            yield body, value


def is_known(hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if `CALLS` describes every graph among the arguments."""
    if hop not in CALLS:
        return False
    listed = {id(graph) for _, graph in each_body(hop, args)}
    graphs = filter(is_graph, pytree.tree_leaves((args, kwargs), is_leaf=is_graph))
    return all(id(graph) in listed for graph in graphs)


def agreed_outputs(hop: HigherOrderOperator, args: tuple[Any, ...], outputs: Sequence[Any]) -> list[list[Any]]:
    """Per body, the dtypes its outputs must be cast to (None: as they are), where they depend on one another."""
    free: list[list[Any]] = [[None] * len(pytree.tree_leaves(output)) for output in outputs]
    if hop is HOPS.cond:  # both branches give one dtype, the widest
        values = zip(*map(pytree.tree_leaves, outputs), strict=True)
        return [[_widest_of(pair) for pair in values]] * 2
    if hop is HOPS.while_loop:  # a carried value keeps its dtype
        carried = [v.dtype if isinstance(v, torch.Tensor) else None for v in args[2]]
        return [free[0], carried]
    return free


def _widest_of(values: tuple[Any, ...]) -> torch.dtype | None:
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return widest(dtypes) if len(dtypes) > 1 and dtypes <= FLOATS else None


def call_on_fakes(hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result of a call; of ops that only tag or name their body, the body's result."""
    if hop is HOPS.tag_activation_checkpoint:
        return args[0](*args[1:])
    if hop is HOPS.invoke_subgraph:
        return args[0](*args[2:])
    return hop(*args, **kwargs)


def fake_result(
    hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Any], traced: Any
) -> Any:
    """The fake result of a call whose bodies give `outputs`; `traced` is its result from capture."""
    if hop in (HOPS.tag_activation_checkpoint, HOPS.invoke_subgraph, HOPS.wrap_with_set_grad_enabled):
        return outputs[0]
    if hop is HOPS.autograd_function_apply:
        return outputs[0][0]
    if hop in (HOPS.cond, HOPS.while_loop):  # only `traced` has sizes that differ between branches or rounds
        leaves, spec = pytree.tree_flatten(traced)
        examples = pytree.tree_leaves(outputs[-1])
        return pytree.tree_unflatten(
            [to_dtype(v, getattr(like, "dtype", None)) for v, like in zip(leaves, examples, strict=True)], spec
        )
    return call_on_fakes(hop, args, kwargs)
