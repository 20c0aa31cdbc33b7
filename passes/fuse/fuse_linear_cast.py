"""Fuse a weight's cast into its product, which then reads the float32 weight and rounds it in registers.

This is for casts that `hoist_weights` leaves: of weights that the graph computes, or that change without a version
bump. Products differ only in the order of their sums; the gradient of the weight isn't rounded to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.kernels.linear_cast import LINEAR_CAST, ROWS_FEW, ROWS_SHARED
from ampcompile.passes.analysis.aliasing import Aliases
from ampcompile.passes.analysis.commuting import CAST, rebuild
from ampcompile.passes.analysis.gradients import recorded_by_autograd
from ampcompile.passes.analysis.sizes import elements_hint, is_smaller
from ampcompile.passes.graph import call_on_values, cast_of, erase_unread, graphs, op_name
from ampcompile.torch_private import tracing
from ampcompile.torch_private.types import is_traceable_wrapper_subclass

from .matching import Fusion, FusionCost, argument, fuse, is_low, is_view

aten = torch.ops.aten
_COPIES = (aten.contiguous.default, aten.clone.default)
# Products by a library's kernel: their result is in memory, and a cast of it is a kernel of its own.
_STORED = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.matmul.default, aten.linear.default)


@dataclass(frozen=True)
class _Layer:
    """A product read as `x @ weight.t() + bias`."""

    x: Node
    weight: Node
    bias: Node | None = None
    transposed: bool = False
    """The operand is the transpose of the weight."""
    swapped: bool = False
    """The weight is the first operand: x and the result are transposed."""


@dataclass(frozen=True)
class _Source:
    """The float32 source of an operand: our cast of it, and the views from the cast to the operand."""

    cast: Node
    views: list[Node]

    @property
    def value(self) -> Node:
        return self.cast.args[0]

    @property
    def nodes(self) -> list[Node]:
        return [self.cast, *self.views]


def _readings(node: Node) -> Iterator[_Layer]:
    """Yield the ways to read an op as a layer; either operand of a matrix product may be the weight."""
    if node.target is aten.linear.default:
        yield _Layer(node.args[0], node.args[1], argument(node, 2, "bias"))
    elif node.target in (aten.mm.default, aten.matmul.default):
        first, second = node.args
        yield _Layer(first, second, transposed=True)
        yield _Layer(second, first, swapped=True)
    elif node.target is aten.addmm.default and node.kwargs.get("beta", 1) == node.kwargs.get("alpha", 1) == 1:
        bias, first, second = node.args
        if bias.meta["val"].shape == second.meta["val"].shape[1:]:
            yield _Layer(first, second, bias, transposed=True)


def _find_source(operand: Any, memory: Aliases) -> _Source | None:
    """The float32 source of a 16-bit operand; None if there is none, or if another op reads the 16-bit value too."""
    views: list[Node] = []
    while is_view(operand) and operand.target not in _COPIES and len(operand.users) == 1:
        views.insert(0, operand)
        operand = operand.args[0]
    if not isinstance(operand, Node) or operand.target is not CAST or not cast_of(operand):
        return None
    before = operand.args[0].meta["val"]
    plain = before.dtype is torch.float32 and not is_traceable_wrapper_subclass(before)
    unshared = len(operand.users) == 1 and not memory.is_written(operand.args[0])
    return _Source(operand, views) if plain and unshared and is_low(operand) else None


def _lies_in_memory(value: Node) -> bool:
    """True if a float32 value is in memory in any case, not computed by Inductor in a loop that could cast it too."""
    while is_view(value) and value.target not in _COPIES:
        value = value.args[0]
    return value.op != "call_function" or value.target in _STORED


def _few_rows(layer: _Layer) -> bool:
    """True if static shapes show that the kernel is bound by the weight's bytes."""
    shape = layer.x.meta["val"].shape
    rows = shape[1:] if layer.swapped else shape[:-1]
    return all(isinstance(size, int) for size in rows) and math.prod(rows) <= ROWS_FEW


def _count_bytes(layer: _Layer, source: _Source, out: Node, backward: bool) -> tuple[int, int] | None:
    """Bytes saved and moved by this product, and by that of x's gradient; None if they depend on data."""
    x, weight, result = (elements_hint(node.meta["val"]) for node in (layer.x, layer.weight, out))
    if x is None or weight is None or result is None:
        return None
    rows = math.isqrt(x * result // max(1, weight))  # rows * depth * rows * features / (features * depth)
    reads = max(1, -(-rows // ROWS_SHARED))
    stored = _lies_in_memory(source.value)
    unfused = (6 if stored else 2) * weight + 2 * reads * weight
    fused = (0 if stored else 4) * weight + 4 * reads * weight
    times = 2 if backward else 1
    return times * (unfused - fused), times * (unfused + 2 * (x + result))


@dataclass(frozen=True)
class FuseLinearCast:
    """Returns the number of products fused. `gradients`: whether grad mode is on around the graph.

    Where counts decide, it fuses products of few rows with a float32 weight in memory: they are bound by the weight's
    bytes, which fusing halves. Products of many rows are bound by arithmetic, which fusing doesn't reduce.
    """

    cost: FusionCost
    gradients: bool
    family = "linear"
    name = "fuse_linear_cast"
    exact = False  # sums are taken in another order, and gradients of weights are not rounded
    fate = "fused"

    def apply(self, gm: GraphModule) -> int:
        with tracing.on_fakes_of(gm), torch.no_grad():
            return sum(self._fuse(graph) for graph in graphs(gm))

    def _fuse(self, gm: GraphModule) -> int:
        memory, recorded = Aliases(gm.graph), recorded_by_autograd(gm.graph, self.gradients)
        fused = 0
        for node in list(gm.graph.nodes):
            for layer in _readings(node) if node.op == "call_function" else ():
                source = self._match(layer, memory)
                if source is None:
                    continue
                saved, moved = _count_bytes(layer, source, node, layer.x in recorded) or (None, None)
                if self.cost.pays(node.meta["val"].device, saved if _few_rows(layer) else 0, moved):
                    record = Fusion(self.family, op_name(node.target), saved or 0)
                    _replace(node, layer, source, _find_source(layer.bias, memory), record)
                    fused += 1
                    break
        return fused

    def _match(self, layer: _Layer, memory: Aliases) -> _Source | None:
        if not is_low(layer.x) or layer.weight.meta["val"].dim() != 2:
            return None
        x, weight = layer.x.meta["val"], layer.weight.meta["val"]
        # Of two plain matrices the larger one is the weight: its bytes can be saved.
        if x.dim() < 2 or (layer.swapped and (x.dim() != 2 or is_smaller(weight, x))):
            return None
        return _find_source(layer.weight, memory)


def _replace(node: Node, layer: _Layer, source: _Source, bias: _Source | None, record: Fusion) -> None:
    with node.graph.inserting_before(node):
        weight = rebuild(source.views, source.value)
        weight = _call(aten.t.default, weight) if layer.transposed else weight
        x = _call(aten.t.default, layer.x) if layer.swapped else layer.x
        full_bias = layer.bias if bias is None else rebuild(bias.views, bias.value)
    new = fuse(node, LINEAR_CAST, (x, weight, full_bias), record)
    if layer.swapped:
        with node.graph.inserting_before(node):
            transposed = _call(aten.t.default, new)
            result = _call(aten.contiguous.default, transposed)
        new.replace_all_uses_with(result, delete_user_cb=lambda user: user is not transposed)
    erase_unread([*source.nodes, *([] if bias is None else bias.nodes), node])


def _call(op: Any, operand: Node) -> Node:
    node = operand.graph.call_function(op, (operand,))
    node.meta = {key: operand.meta[key] for key in ("stack_trace", "nn_module_stack") if key in operand.meta}
    node.meta["val"] = call_on_values(node)
    return node
