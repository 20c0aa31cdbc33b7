"""Residual addition, norm and casts in one kernel: float32 stays in its registers.

What is fused: `cast(norm(cast(x + residual)))`, or the part of it that is there; behind a group norm, SiLU before the
cast. A cast of ours behind the norm becomes a result of the kernel, one for each reader, whose gradients the kernel
adds up in float32; a cast to float32 in front of it, and the addition, become part of its load. The sum, and the norm
in float32, are results too where somebody else reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import FLOATS
from ampcompile.kernels.group_norm import GROUP_NORM
from ampcompile.kernels.norm import NORM
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST, rebuild, same_layout
from ampcompile.passes.analysis.gradients import grad_mode_stretches
from ampcompile.passes.graph import erase_unread, graphs, op_name
from ampcompile.torch_private import tracing

from .matching import Fusion, FusionCost, find_16_bit_source, fuse, is_low, is_view
from .norm_patterns import Norm, norms

ADD = torch.ops.aten.add.Tensor
SAVED = 0, 0
"""Bytes saved of those moved: Inductor, too, adds, norms and casts in one kernel, backward included
(`triton.mix_order_reduction`, on in every release from 2.11). What a kernel gains beyond, only a GPU can tell; so for
group norm's backward, which Inductor runs in two, but whose kernel holds on to a layout."""


@dataclass(frozen=True)
class FuseNorm:
    """Returns how many norms were fused. Not exact: rows are summed in another order."""

    cost: FusionCost
    name = "fuse_norm"
    family = "norm"
    exact = False
    fate = "fused"

    def apply(self, gm: GraphModule) -> int:
        return sum(self._fuse(graph) for graph in graphs(gm))

    def _fuse(self, gm: GraphModule) -> int:
        memory, stretch, fused = Aliases(gm.graph), grad_mode_stretches(gm.graph), 0
        with tracing.on_fakes_of(gm), torch.no_grad():
            for norm in norms(gm.graph):
                if _suits(norm, memory, stretch) and self.cost.pays(norm.node.meta["val"].device, *SAVED):
                    fused += _rewrite(norm, memory, stretch)
        return fused


def _suits(norm: Norm, memory: Aliases, stretch: dict[Node, int]) -> bool:
    """Whether the kernel takes such operands, nobody writes into them, and all of it has a gradient or none."""
    given = [node for node in (norm.node, norm.operand, norm.weight, norm.bias) if node is not None]
    values = [node.meta["val"] for node in given]
    return (
        all(value.dtype in FLOATS and value.device == values[0].device for value in values)
        and norm.width > 0
        and all(map(_is_dense, values[: 2 if norm.groups else 1]))
        and not any(map(memory.is_written, given))
        and all(stretch[node] == stretch[norm.node] for node in norm.inside)
    )


def _is_dense(value: torch.Tensor) -> bool:
    return same_layout(value, value.new_empty(value.shape))


def _rewrite(norm: Norm, memory: Aliases, stretch: dict[Node, int]) -> bool:
    node, casts = norm.node, _low_readers(norm.node)
    operand, inside = norm.operand, [*norm.inside, node]
    before = find_16_bit_source(operand)
    here = stretch[node]
    if before is not None and not memory.is_written(before[0]) and all(stretch[n] == here for n in before[1]):
        inside = [*before[1], *inside]
        with node.graph.inserting_before(node):
            operand = rebuild([step for step in before[1] if step.target is not CAST], before[0])
    addends = _addends(operand, node, {*inside}, memory) if stretch.get(operand) == here else None
    x, residual = addends or (operand, None)
    own = is_low(node)
    if not own and not casts and not any(map(is_low, (x, residual))):
        return False
    low = next((n.meta["val"].dtype for n in (node, *casts, x, residual) if is_low(n)), torch.bfloat16)
    casts = [_cast_before_views(cast, node) for cast in casts if cast.meta["val"].dtype is low]
    wide = not own and _is_read(node, {*casts})
    results = [None, *([None] if norm.centered else []), *([operand] if addends else [])]
    results += [node] if wide or own else []
    arguments = (
        *(x, residual, *map(_narrow_vector, (norm.weight, norm.bias)), norm.groups or norm.width, norm.eps),
        *(norm.silu if norm.groups else norm.centered, norm.inner, wide, low, own + len(casts)),
    )
    op, record = GROUP_NORM if norm.groups else NORM, Fusion("norm", op_name(norm.what), 0)
    fuse(node, op, arguments, record, [*results, *casts])
    erase_unread(sorted({*inside, *casts, *([operand] if addends else [])}))
    return True


def _addends(h: Node, norm: Node, inside: set[Node], memory: Aliases) -> tuple[Node, Node] | None:
    """The two terms of a sum that the norm's kernel can compute: alike in shape, and read by nobody before."""
    if h.target is not ADD or h.kwargs or not all(isinstance(term, Node) for term in h.args):
        return None
    values = [node.meta["val"] for node in (h, *h.all_input_nodes)]
    alike = all(v.dtype in FLOATS and v.device == values[0].device for v in values)
    alike = alike and all(list(map(str, v.shape)) == list(map(str, values[0].shape)) for v in values)
    written = any(map(memory.is_written, (h, *h.all_input_nodes)))
    if not alike or written or not _is_dense(values[0]) or any(user < norm for user in h.users if user not in inside):
        return None
    return h.args


def _low_readers(node: Node) -> list[Node]:
    """The casts of ours to 16 bits that read a value, itself or through views."""
    found: list[Node] = []
    for user in node.users:
        if user.target is CAST and "amp_cast" in user.meta and is_low(user):
            found.append(user)
        elif is_view(user):
            found += _low_readers(user)
    return found


def _cast_before_views(cast: Node, source: Node) -> Node:
    """A cast of `source` itself, whose views are what `cast` was."""
    path: list[Node] = []
    while (step := cast.args[0] if not path else path[0].args[0]) is not source:
        path.insert(0, step)
    if not path:
        return cast
    with cast.graph.inserting_before(cast):
        first = cast.graph.node_copy(cast)
        first.args = (source, *cast.args[1:])
        first.meta = {**cast.meta, "val": source.meta["val"].to(cast.meta["val"].dtype)}
        cast.replace_all_uses_with(rebuild(path, first))
    erase_unread([*path, cast])
    return first


def _is_read(node: Node, casts: set[Node]) -> bool:
    """Whether anything but these casts reads a value or a view of it."""
    return any(user not in casts and (not is_view(user) or _is_read(user, casts)) for user in node.users)


def _narrow_vector(vector: Node | None) -> Any:
    """The 16-bit form of a weight that was widened for the norm."""
    return vector if vector is None or (found := find_16_bit_source(vector)) is None or len(found[1]) > 1 else found[0]
