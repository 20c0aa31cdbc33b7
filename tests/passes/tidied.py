"""Graphs with their casts in place, before and after a pass that tidies them, run on the same numbers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ampcompile.dtypes import short_name
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has
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
    return [f"{name_of(n.target)}:{short_name(n.meta['val'].dtype)}" for n in calls]


def name_of(target: Any) -> str:
    """Of an op, or of a function such as `getitem`."""
    return target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else target.__name__


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
    """Apply a pass and hold every result, and every gradient, against those before. Returns the rewrites.

    Where it declines, it leaves the graph as it is; a second run finds nothing.
    """
    before, ops = results(copy.deepcopy(gm), args, gradients), spelled(gm)
    rewrites = run_passes([each], gm)[0].rewrites
    assert same_bits(results(gm, args, gradients), before)
    assert rewrites or spelled(gm) == ops
    assert each.apply(gm) == 0, "idempotent"
    return rewrites


def traced(f: Callable[..., Any], *args: Tensor, device: str = "cpu") -> GraphModule:
    """A function's graph as passes behind differentiation meet it, on a device that need not be there."""
    with FakeTensorMode():
        fakes = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device) for a in args]
        return make_fx(f)(*(fake.requires_grad_(a.requires_grad) for fake, a in zip(fakes, args, strict=True)))


def words(gm: GraphModule) -> str:
    """Every op in order; of casts `>` widens, `<` narrows, `=` keeps the size: `> mul <`."""
    return " ".join(word(node) for node in gm.graph.nodes if node.op == "call_function")


def word(node: Node) -> str:
    """One op, in `words`."""
    if has(node.target, CONVERSIONS_AFTER):
        before, after = (each.meta["val"].dtype for each in (node.args[0], node))
        if before != after:
            return "<=>"[1 + (after.itemsize > before.itemsize) - (after.itemsize < before.itemsize)]
    return name_of(node.target).rpartition("::")[2]


def tidied_joint(
    f: Callable[..., Any], each: Pass, *args: Tensor, device: str = "cpu", close: Sequence[int] | None = None
) -> tuple[GraphModule, int]:
    """A function's graph after a pass behind differentiation, and the rewrites; it runs on the CPU in any case.

    The results have the dtypes, shapes and strides of before, and the bits, except those numbered in `close`: all of a
    pass that isn't exact. Where the pass declines, it leaves the graph as it is; a second run finds nothing.
    """
    gm = traced(f, *args, device=device)
    before, layout = str(gm.graph), layouts(gm)
    rewrites = run_passes([each], gm)[0].rewrites
    assert layouts(gm) == layout
    assert rewrites or str(gm.graph) == before
    gm.graph.eliminate_dead_code()
    gm.recompile()
    found, expected = (pytree.tree_leaves(run(*(arg.clone() for arg in args))) for run in (gm, f))
    close = range(0 if each.exact else len(expected)) if close is None else close
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if number in close:
            last_digit = {"rtol": 2**-8, "atol": 0} if theirs.dtype == LOW else {}
            torch.testing.assert_close(ours, theirs, equal_nan=True, **last_digit)
        else:
            assert same_bits(ours, theirs)
    assert each.apply(gm) == 0, "idempotent"
    return gm, rewrites


def layouts(gm: GraphModule) -> list[Any]:
    """What a graph's results look like from outside."""
    values = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    return [(value.dtype, value.shape, value.stride(), value.device) for value in values if isinstance(value, Tensor)]
