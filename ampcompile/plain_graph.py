"""`lower="eager"`: the rewritten graph itself, differentiable any number of times, autocast acting nowhere in it.

AOTAutograd bakes a backward that excludes autocast. Here autograd's own nodes run, and a region that is open around
`loss.backward()` would act on the operations in them. So the graph's backward is one node for the outside, which
has autograd run the nodes inside with autocast excluded. The inner graph stays connected to the real inputs: what
it computes with `create_graph=True` is differentiable again, and wrapped again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from . import compat


def without_autocast(gm: GraphModule) -> Callable[..., Any]:
    """`gm` as a callable of the same arguments and results, with autocast excluded forward and backward."""

    def run(*args: Any) -> Any:
        versions = [(arg, arg._version) for arg in args if _wants_gradient(arg)]
        grad_enabled = torch.is_grad_enabled()
        try:
            with compat.autocast_off():
                results = gm(*args)
        except BaseException:
            torch._C._set_grad_enabled(grad_enabled)  # the graph sets it at nodes of its own
            raise
        if not versions or any(arg._version != version for arg, version in versions):
            return results  # nothing to differentiate, or inputs written in place: their history is the graph's
        leaves, spec = pytree.tree_flatten(results)
        return pytree.tree_unflatten(_guarded(leaves, [arg for arg, _ in versions]), spec)

    return run


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_inference()


def _guarded(results: Sequence[Any], inputs: Sequence[torch.Tensor], shared: bool = False) -> list[Any]:
    """The results with one autograd node between them and the graph they came from.

    `shared`: the graph reaches into another one that is behind a node of its own.
    """
    given = {id(tensor) for tensor in inputs}
    inner = [r for r in results if _wants_gradient(r) and id(r) not in given and not r._is_view()]
    if not inner or torch._C._are_functorch_transforms_active():
        return list(results)
    outer = dict(zip(map(id, inner), _Backward.apply(inner, shared, *inputs), strict=True))
    return [outer.get(id(result), result) for result in results]


class _Backward(torch.autograd.Function):
    """Results of a graph as functions of its inputs; their backward runs the graph's own with autocast excluded."""

    @staticmethod
    def forward(ctx: Any, inner: list[torch.Tensor], shared: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inner, ctx.shared, ctx.inputs = inner, shared, inputs
        return tuple(result.detach() for result in inner)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        reached = [(r, g) for r, g in zip(ctx.inner, gradients, strict=True) if g is not None]
        wanted = [i for i, needed in zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True) if needed]
        if not reached or not wanted:
            return (None,) * (2 + len(ctx.inputs))
        again = torch.is_grad_enabled()
        ctx.shared |= again  # by the gradients' own graph, from now on
        with compat.autocast_off():
            found: Sequence[Any] = torch.autograd.grad(
                [result for result, _ in reached],
                wanted,
                [gradient for _, gradient in reached],
                retain_graph=ctx.shared or compat.graph_is_kept(),
                create_graph=again,
                allow_unused=True,
            )
        if again:
            found = _guarded(found, [*wanted, *(g for _, g in reached if _wants_gradient(g))], shared=True)
        by_input = dict(zip(map(id, wanted), found, strict=True))
        return (None, None, *(by_input.get(id(tensor)) for tensor in ctx.inputs))
