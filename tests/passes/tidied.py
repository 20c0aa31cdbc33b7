"""Graphs with their casts in place, before and after a pass that tidies them, run on the same numbers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.dtypes import short_name
from ampcompile.passes.base import Pass, run_passes
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import cast_of, graphs
from ampcompile.policy import Policy
from tests.compiling import LOW, same_bits
from tests.passes.captured import captured, on


def inserted(f: Callable[..., Any], *args: Tensor, dtype: torch.dtype = LOW, policy: str = "") -> GraphModule:
    """`f`'s graph as `insert_casts` leaves it."""
    gm = captured(f, *args, dtype=dtype)
    run_passes([AssignPrecision(Policy.parse(policy), on(dtype)), InsertCasts()], gm)
    return gm


def ours(gm: GraphModule) -> list[Node]:
    """The casts that we inserted and that are still there."""
    return [node for graph in graphs(gm) for node in graph.graph.nodes if cast_of(node)]


def spelled(gm: GraphModule) -> list[str]:
    """Every op in order, with the dtype of its result: `to:bf16 matmul:bf16`."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
    return [f"{n.target._schema.name.removeprefix('aten::')}:{short_name(n.meta['val'].dtype)}" for n in calls]


def results(gm: GraphModule, args: tuple[Any, ...], gradients: bool) -> list[Any]:
    """What a graph gives, what it leaves in its inputs, and their gradients."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    leaves = [a.clone().requires_grad_(gradients and a.is_floating_point()) for a in tensors]
    written = [leaf.clone() if gradients else leaf for leaf in leaves]
    handed = iter(written)
    inputs = [next(handed) if isinstance(a, Tensor) else a for a in args]  # sizes stay numbers
    with torch.set_grad_enabled(gradients):
        found = list(gm(*inputs))
        wanted = [f for f in found if isinstance(f, Tensor) and f.requires_grad]
        if wanted:
            generator = torch.Generator().manual_seed(0)
            torch.autograd.backward(wanted, [torch.randn(w.shape, generator=generator).to(w.dtype) for w in wanted])
    return [*(f.detach() for f in found), *(w.detach() for w in written), *(leaf.grad for leaf in leaves)]


def tidied(gm: GraphModule, each: Pass, *args: Tensor, gradients: bool = True) -> int:
    """Apply a pass and hold every result, and every gradient, against those before. Returns the rewrites."""
    before = results(copy.deepcopy(gm), args, gradients)
    rewrites = run_passes([each], gm)[0].rewrites
    assert same_bits(results(gm, args, gradients), before)
    return rewrites


def tidied_joint(f: Callable[..., Any], each: Pass, *args: Tensor) -> tuple[GraphModule, int]:
    """A function's graph after a pass that acts behind differentiation, with the same bits; and the rewrites."""
    gm = make_fx(f, tracing_mode="fake")(*args)
    before, rewrites = f(*args), each.apply(gm)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert same_bits(gm(*args), before)
    assert each.apply(gm) == 0, "idempotent"
    return gm, rewrites
