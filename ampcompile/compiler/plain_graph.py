"""Run a rewritten graph without compiling it: differentiable any number of times, with autocast excluded.

AOTAutograd compiles a backward that excludes autocast. Here autograd's own nodes run, and a region that is open around
`loss.backward()` would affect the operations in them. So autograd sees the graph as one node, whose backward runs the
inner nodes with autocast excluded. Inside, detached stand-ins replace the inputs: one input may be a function of
another, and autograd computes gradients between them outside of the node. The gradients that the node computes with
`create_graph=True` are differentiable again, through another such node.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule, Node

from ampcompile.errors import UnsupportedError
from ampcompile.passes.analysis.aliasing import aliased_operands, written_operands
from ampcompile.passes.base import run_passes
from ampcompile.passes.graph import graphs, is_below_autograd
from ampcompile.passes.pipeline import replay
from ampcompile.passes.replay import has_closed_backward
from ampcompile.torch_private import autocast, compiled_functions, pytree, storages, tracing

CLOSED = (
    "calls a custom autograd function whose backward reads what its forward computed along the way: expected one that "
    "saves only inputs and outputs; or keep the function out of the graph with torch.compiler.disable"
)


def exclude_autocast(gm: GraphModule) -> Callable[..., Any]:
    """Return `gm` as a callable with the same arguments and results, and autocast excluded forward and backward."""
    run_passes(replay(), gm)
    writes, refusal = writes_to_inputs(gm), CLOSED if has_closed_backward(gm) else None

    def run(*args: Any) -> Any:
        inputs = {id(arg): arg for arg in args if _wants_gradient(arg)} if torch.is_grad_enabled() else {}
        if writes or not inputs or tracing.transforms_are_active():
            return _run(gm, args)  # the history of inputs written in place must stay visible to autograd
        inside = {key: make_stand_in(tensor) for key, tensor in inputs.items()}
        results = _run(gm, [inside.get(id(arg), arg) for arg in args])
        leaves, spec = pytree.tree_flatten(results)
        return pytree.tree_unflatten(hide_behind_node(leaves, [*inputs.values()], [*inside.values()], refusal), spec)

    return run


def _run(gm: GraphModule, args: Sequence[Any]) -> Any:
    grad_enabled = torch.is_grad_enabled()
    try:
        with autocast.autocast_off():
            return gm(*args)
    except BaseException:
        autocast.SET_GRAD_ENABLED(grad_enabled)  # nodes of the graph may have changed it
        raise


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not value.is_inference()


def make_stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same memory without autograd history."""
    return tensor.detach().requires_grad_()


def _root_of(tensor: Tensor) -> Tensor:
    """The base to which a view's gradient flows; the tensor itself if it has no gradient, or one of its own.

    A custom autograd function may return a view, also of its input: the gradient of that is the function's.
    """
    if (base := tensor._base) is None or not (tensor.requires_grad and base.requires_grad):
        return tensor
    node, number = tensor.grad_fn, tensor.output_nr
    while (node, number) != (base.grad_fn, base.output_nr) and getattr(node, "variable", None) is not base:
        if isinstance(node, BackwardCFunction | None) or len(node.next_functions) != 1:
            return tensor
        node, number = node.next_functions[0]
    return base


def hide_behind_node(
    results: Sequence[Any],
    inputs: Sequence[Tensor],
    inside: Sequence[Tensor],
    refusal: str | None = None,
    shared: bool = False,
) -> list[Any]:
    """Turn results computed from stand-ins into functions of the real inputs, behind one autograd node.

    `refusal`: why their gradients can't be differentiated again. `shared`: the autograd graph includes nodes of another
    one, which is behind a node of its own.
    """
    outer = dict(zip(map(id, inside), inputs, strict=True))
    roots = [_root_of(result) if _wants_gradient(result) else None for result in results]
    roots = [r if r is not None and (r.grad_fn is not None or id(r) in outer) else None for r in roots]
    inner = list({id(root): root for root in roots if root is not None and id(root) not in outer}.values())
    if inner:
        outer |= zip(map(id, inner), _Backward.apply(inner, inside, refusal, shared, *inputs), strict=True)

    def of_inputs(result: Any, root: Tensor | None) -> Any:
        if root is None or root is result:
            return outer.get(id(root), result)
        return storages.view_again(result, outer[id(root)])

    return list(map(of_inputs, results, roots))


def differentiate(
    reached: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], inside: Sequence[Tensor], keep: bool
) -> Sequence[Tensor | None]:
    """The gradients of `inputs`, given (result, gradient) pairs of a graph that ran on their stand-ins.

    Autocast is excluded. With gradients enabled they are functions of `inputs` and of the incoming gradients; else
    `keep` decides if the autograd graph is retained.
    """
    again = torch.is_grad_enabled()
    gradients = [gradient for _, gradient in reached]
    wanted = [gradient for gradient in gradients if again and _wants_gradient(gradient)]
    standing = {id(gradient): make_stand_in(gradient) for gradient in wanted}
    with autocast.autocast_off():
        computed: Sequence[Tensor | None] = torch.autograd.grad(
            [result for result, _ in reached],
            list(inside),
            [standing.get(id(gradient), gradient) for gradient in gradients],
            retain_graph=keep or again,
            create_graph=again,
            allow_unused=True,
        )
    if not again:
        return computed
    return hide_behind_node(computed, [*inputs, *wanted], [*inside, *(standing[id(g)] for g in wanted)], shared=True)


class _Backward(torch.autograd.Function):
    """Makes results of a graph functions of its inputs; its backward runs the graph's own with autocast excluded."""

    @staticmethod
    def forward(
        ctx: Any, inner: list[Tensor], inside: Sequence[Tensor], refusal: str | None, shared: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inner, ctx.inside, ctx.inputs, ctx.refusal, ctx.shared = inner, inside, inputs, refusal, shared
        return tuple(result.detach() for result in inner)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        reached = [(r, g) for r, g in zip(ctx.inner, gradients, strict=True) if g is not None]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        by_index: dict[int, Tensor | None] = {}
        if reached and wanted:
            # Nodes of a shared graph may run in several backwards within one: each has a checkpoint recompute for it.
            part = contextlib.nullcontext() if ctx.shared else compiled_functions.within_graph_task()
            ctx.shared |= torch.is_grad_enabled()  # the gradients' own graph uses these nodes from now on
            inputs, inside = ([tensors[i] for i in wanted] for tensors in (ctx.inputs, ctx.inside))
            keep = ctx.shared or compiled_functions.graph_is_kept()
            again = torch.is_grad_enabled()
            with part, torch.set_grad_enabled(again and not ctx.refusal):
                computed = differentiate(reached, inputs, inside, keep)
            by_index = dict(
                zip(wanted, refuse_gradients(ctx.refusal, computed) if again and ctx.refusal else computed, strict=True)
            )
        return (None, None, None, None, *map(by_index.get, range(len(ctx.inputs))))


def refuse_gradients(reason: str, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the gradients such that differentiating them raises UnsupportedError."""
    return _Refused.apply(reason, torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True), *gradients)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reason: str, _: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.reason = reason
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(f"found a gradient of a gradient through a compiled graph that {ctx.reason}")


def writes_to_inputs(gm: GraphModule) -> bool:
    """True if an op of the graph, or of a body it calls, writes to an input in place, by its schema."""
    nodes = (node for graph in graphs(gm) for node in graph.graph.nodes)
    return any(_begins_as_input(value) for node in nodes for value in written_operands(node, unsaid=False))


def _begins_as_input(value: Node) -> bool:
    """True if a value is an input, or shares an input's memory in a way that autograd tracks.

    Decided by schemas alone: aliases that they don't declare are rare, and a graph that writes to inputs gets no node.
    """
    if value.op == "placeholder" or is_below_autograd(value.target):
        return value.op == "placeholder"
    return any(map(_begins_as_input, aliased_operands(value, unsaid=False)))
