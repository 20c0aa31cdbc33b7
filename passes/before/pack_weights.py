"""On the CPU: let linear layers and 2-D convolutions read hoisted weights packed in oneDNN's blocks.

Packing changes no bit of the results of layers large enough to gain. It happens once instead of at every call, so it
needs a copy that lives across calls: this pass replaces the `weight_copy` reads that `hoist_weights` put before layers.
It is for graphs without gradients: a trained weight changes before its packing has paid.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ampcompile.kernels.packed_conv import PACKED_CONV, Blocks, ConvBlocks
from ampcompile.kernels.packed_linear import PACKED_LINEAR, SMALLEST, LinearBlocks
from ampcompile.passes.analysis.aliasing import is_row
from ampcompile.passes.analysis.op_traits import arguments_by_name, arguments_of
from ampcompile.passes.analysis.products import is_small
from ampcompile.passes.base import Pass
from ampcompile.passes.graph import note, notes_of, placeholders, replace_node
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.torch_private import processor, tracing
from ampcompile.weights.spec import CopySpec

LINEAR = torch.ops.aten.linear.default
CONV = torch.ops.aten.conv2d.default
GELU = torch.ops.aten.gelu.default


class PackedLayer(NamedTuple):
    """A layer that reads its weight packed."""

    op: Any
    blocks: Blocks
    settings: tuple[Any, ...] = ()  # the operator's arguments after the bias


LARGE, MUCH = 1 << 18, 1 << 25
"""Numbers of a float32 weight, and multiplications, above which a layer gains beside MKL on an Intel CPU: MKL starts
faster than oneDNN, and reads a smaller weight from a core's cache."""


def _linear(x: Tensor, weight: Tensor, spec: CopySpec) -> PackedLayer | None:
    if weight.dim() != 2 or min(weight.shape) < SMALLEST:
        return None
    if spec.form.wide and processor.suits_mkl() and weight.numel() <= LARGE:
        work = tracing.product_hint(x.numel(), weight.shape[0])
        if work is None or work <= MUCH:
            return None
    return PackedLayer(PACKED_LINEAR, LinearBlocks())


def _conv(
    x: Tensor, weight: Tensor, spec: CopySpec, stride: Any, padding: Any, dilation: Any, groups: Any
) -> PackedLayer | None:
    one_channel = weight.shape[1] * groups == 1  # ATen takes any layout of one channel for a contiguous one
    numbers = [*stride, *padding, *dilation, groups]
    if one_channel or x.dim() != 4 or not all(type(number) is int for number in numbers):
        return None
    stride, padding, dilation = (tuple(numbers) * (2 // len(numbers)) for numbers in (stride, padding, dilation))
    sizes = tuple(size for size in map(tracing.product_hint, x.shape) if size is not None)
    blocks = ConvBlocks(stride, padding, dilation, groups, sizes if len(sizes) == x.dim() else None)
    return PackedLayer(PACKED_CONV, blocks, (stride, padding, dilation, groups))


LAYERS: dict[Any, Callable[..., PackedLayer | None]] = {LINEAR: _linear, CONV: _conv}


def _arguments(layer: Node) -> list[Any]:
    """All arguments of a layer, defaults included."""
    op: Any = layer.target
    given = arguments_by_name(op, layer.args, layer.kwargs)
    return [given.get(argument.name, argument.default_value) for argument in arguments_of(op)]


def _packable(read: object, dtypes: frozenset[torch.dtype]) -> bool:
    if not isinstance(read, Node) or read.target is not WEIGHT_COPY or len(read.users) > 1:
        return False
    copy = read.args[1].meta["val"]
    return copy.device.type == "cpu" and copy.dtype in dtypes


def _is_small(x: Tensor, weight: Tensor, result: Tensor) -> bool:
    multiplications = result.numel() * (weight.numel() // weight.shape[0])
    return is_small(multiplications, x.numel() + weight.numel() + result.numel())


def _take_gelu_in(layer: Node) -> None:
    if len(layer.users) != 1:
        return
    (reader,) = layer.users
    if reader.target is not GELU or reader.meta["val"].dtype != layer.meta["val"].dtype:
        return
    approximate = reader.kwargs.get("approximate", "none")
    layer.args = (*layer.args, approximate)
    replace_node(reader, layer)


@dataclass(frozen=True)
class PackWeights(Pass):
    """`dtypes`: those of packed products on this machine; `small`: small products too, see `products.SMALL`.

    `relaxed`: a GELU that alone reads a linear layer is taken in the product, of sums that aren't rounded yet.
    """

    dtypes: frozenset[torch.dtype]
    small: bool = True
    relaxed: bool = False
    name = "pack_weights"

    @property
    def exact(self) -> bool:
        return not self.relaxed

    def apply(self, gm: GraphModule) -> int:
        inputs: dict[CopySpec, Node] = {}
        layers = [node for op in LAYERS for node in gm.graph.find_nodes(op="call_function", target=op)]
        packed = 0
        with tracing.on_fakes_of(gm):
            for layer in layers:
                x, read, bias, *settings = _arguments(layer)
                if not _packable(read, self.dtypes):
                    continue
                if bias is not None and not is_row(bias, read.meta["val"].shape[0]):  # oneDNN reads no other
                    continue
                if not self.small and _is_small(*(node.meta["val"] for node in (x, read, layer))):
                    continue
                weight, copy, _ = read.args
                spec = notes_of(copy).copy
                assert spec is not None
                if spec.gathered:
                    continue
                new = LAYERS[layer.target](x.meta["val"], read.meta["val"], spec, *settings)
                if new is None:
                    continue
                form = self._input(gm, inputs, copy, replace(spec, blocks=new.blocks))
                layer.target, layer.args, layer.kwargs = new.op, (x, weight, form, bias, *new.settings), {}
                gm.graph.erase_node(read)
                packed += 1
                if self.relaxed and new.op is PACKED_LINEAR:
                    _take_gelu_in(layer)
        for node in placeholders(gm):
            if notes_of(node).copy is not None and not node.users:
                gm.graph.erase_node(node)
        return packed

    def _input(self, gm: GraphModule, inputs: dict[CopySpec, Node], copy: Node, spec: CopySpec) -> Node:
        if spec not in inputs:
            with gm.graph.inserting_after(placeholders(gm)[-1]):
                inputs[spec] = gm.graph.placeholder(f"{copy.name}_packed")
            inputs[spec].meta = {**copy.meta, "val": spec.empty_like(copy.meta["val"])}
            note(inputs[spec], copy=spec)
            inputs[spec]._dynamo_source = None
        return inputs[spec]
