"""Scale, mask, softmax and casts in one kernel: float32 stays in its registers.

What is fused: `cast(softmax(mask(cast(scores) * scale)))`, less what isn't there. A mask is added, or names what
`masked_fill` or `where` replaces. A value that the graph has in 16 bits is rounded in the kernel where the graph does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import FLOATS
from ampcompile.kernels.softmax import SOFTMAX
from ampcompile.passes.analysis.aliasing import Memory
from ampcompile.passes.analysis.commuting import CAST, same_layout
from ampcompile.passes.analysis.gradients import stretches
from ampcompile.passes.graph import graphs, op_name
from ampcompile.torch_private import tracing

from .matching import Fusion, Worth, argument, drop_unread, fuse, is_low, is_upcast

ATEN = torch.ops.aten
SAVED = 0, 0
"""Bytes saved of those moved: Inductor, too, does all this in one kernel and computes the probabilities again in
backward. What a kernel gains beyond, only a GPU can tell."""


@dataclass(frozen=True)
class Scores:
    """What a softmax reads: `operand`, scaled, then masked; `inside`: the nodes that do so, for nobody else."""

    operand: Node
    inside: tuple[Node, ...] = ()
    scale: float = 1.0
    mask: Node | None = None
    fill: float | None = None
    keep: bool = False
    scaled_low: bool = False
    masked_low: bool = False


@dataclass(frozen=True)
class FuseSoftmax:
    """Returns how many were fused. Not exact: rows are summed in another order."""

    worth: Worth
    name = "fuse_softmax"
    family = "softmax"
    exact = False
    fate = "fused"

    def apply(self, gm: GraphModule) -> int:
        return sum(self._fuse(graph) for graph in graphs(gm))

    def _fuse(self, gm: GraphModule) -> int:
        memory, stretch, fused = Memory(gm.graph), stretches(gm.graph), 0
        with tracing.on_fakes_of(gm), torch.no_grad():
            for node in list(gm.graph.find_nodes(op="call_function", target=ATEN.softmax.int)):
                if self.worth(node.meta["val"].device, *SAVED):
                    fused += _rewrite(node, memory, stretch)
        return fused


def _rewrite(node: Node, memory: Memory, stretch: dict[Node, int]) -> bool:
    found = _read_by(node)
    x, out = found.operand.meta["val"], node.meta["val"]
    result = _narrowing(node)
    given = [n for n in (node, found.operand, found.mask) if n is not None]
    if (
        argument(node, 1, "dim") not in (-1, x.dim() - 1)
        or x.dtype not in FLOATS
        or out.dtype not in (x.dtype, torch.float32)
        or not (is_low(found.operand) or is_low(result))
        or not same_layout(out, out.new_empty(out.shape))
        or any(map(memory.is_written, (*given, *found.inside)))
        or any(n.meta["val"].device != x.device for n in given)
        or any(stretch[n] != stretch[node] for n in (*found.inside, result))  # some of it has no gradient
    ):
        return False
    kinds = found.scale, found.fill, found.keep, found.scaled_low, found.masked_low
    arguments = (found.operand, found.mask, *kinds, result.meta["val"].dtype)
    fuse(node, SOFTMAX, arguments, Fusion("softmax", op_name(node.target), 0), [result])
    drop_unread(sorted({*found.inside, node, result}))
    return True


def _read_by(softmax: Node) -> Scores:
    found = _unwidened(Scores(softmax.args[0]))
    found = _unwidened(_unmasked(found))
    return _unwidened(_unscaled(found))


def _narrowing(softmax: Node) -> Node:
    """The rounding of the result, if nothing else reads it."""
    (only,) = softmax.users if len(softmax.users) == 1 else (softmax,)
    return only if only.target is CAST and is_low(only) else softmax


def _inside(found: Scores, operand: Any) -> bool:
    """Whether the last node before the softmax computes what `operand` becomes, for one reader and in its shape."""
    if not isinstance(operand, Node) or len(found.operand.users) != 1:
        return False
    before, after = operand.meta["val"], found.operand.meta["val"]
    return (
        isinstance(before, torch.Tensor)
        and before.dtype in FLOATS
        and list(map(str, before.shape)) == list(map(str, after.shape))
    )


def _unwidened(found: Scores) -> Scores:
    """Through casts that change no number."""
    node = found.operand
    if node.target is CAST and _inside(found, node.args[0]):
        same = node.meta["val"].dtype is node.args[0].meta["val"].dtype
        if same or is_upcast(node):
            return _unwidened(replace(found, operand=node.args[0], inside=(*found.inside, node)))
    return found


def _unscaled(found: Scores) -> Scores:
    node = found.operand
    if node.target not in (ATEN.mul.Tensor, ATEN.mul.Scalar, ATEN.div.Tensor, ATEN.div.Scalar):
        return found
    x, factor = node.args
    if node.target is ATEN.mul.Tensor and isinstance(factor, Node):
        x, factor = factor, x
    if node.kwargs or not isinstance(factor, int | float) or not factor or not _inside(found, x):
        return found
    scale = float(factor) if "mul" in op_name(node.target) else 1 / factor
    return replace(found, operand=x, inside=(*found.inside, node), scale=scale, scaled_low=is_low(node))


def _unmasked(found: Scores) -> Scores:
    node = found.operand
    if node.target is ATEN.add.Tensor and not node.kwargs:
        for x, mask in (node.args, node.args[::-1]):
            if isinstance(mask, Node) and mask.meta["val"].dtype in FLOATS and _inside(found, x) and _fits(mask, x):
                inside = (*found.inside, node)
                return replace(found, operand=x, inside=inside, mask=mask, masked_low=is_low(node))
    x, mask, fill, keep = _replacing(node)
    if isinstance(mask, Node) and mask.meta["val"].dtype is torch.bool and _inside(found, x) and _fits(mask, x):
        # The constant is rounded to the type that it is written into.
        rounded = torch.tensor(fill, dtype=node.meta["val"].dtype, device="cpu").item()
        return replace(found, operand=x, inside=(*found.inside, node), mask=mask, fill=rounded, keep=keep)
    return found


def _replacing(node: Node) -> tuple[Any, Any, Any, bool]:
    """Value, mask, constant, and whether the mask names what is kept."""
    if node.target is ATEN.masked_fill.Scalar:
        return (*node.args, False)
    if node.target is ATEN.where.ScalarOther:
        return node.args[1], node.args[0], node.args[2], True
    if node.target is ATEN.where.ScalarSelf:
        return node.args[2], node.args[0], node.args[1], False
    return None, None, None, False


def _fits(mask: Node, x: Any) -> bool:
    """Whether the kernel finds its way in a mask: repeated along some of four dimensions."""
    return len(x.meta["val"].shape) <= 4
