"""2-D convolution by oneDNN, with a weight packed beforehand or plain (CPU).

oneDNN's convolutions read weights in blocks that suit the vector unit and the shapes. oneDNN packs a plain weight at
every call, and uses a packed one directly. The bits of the result are the same, but for some small convolutions in
float32, which ATen runs in a kernel of its own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private.storages import suggest_memory_format

from .packed_linear import LinearBlocks

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define(
    "packed_conv(Tensor x, Tensor weight, Tensor packed, Tensor? bias, SymInt[2] stride, SymInt[2] padding, "
    "SymInt[2] dilation, SymInt groups) -> Tensor"
)
CONVOLVE = torch.ops.mkldnn._convolution_pointwise.default
PACKED_CONV = torch.ops.ampcompile.packed_conv.default


@dataclass(frozen=True)
class ConvBlocks:
    """The blocks of a weight for oneDNN's convolution with these settings."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    input_size: tuple[int, ...] | None = field(default=None, compare=False)
    """The size for which the blocks are optimal: that of the first input that shares them. Other sizes work too."""

    def pack(self, copy: Tensor) -> Tensor:
        """Pack `copy` (out_channels, in_channels / groups, height, width), bfloat16 or float32, as an opaque tensor."""
        return torch.ops.mkldnn._reorder_convolution_weight(
            copy.detach(), self.padding, self.stride, self.dilation, self.groups, self.input_size
        )


Blocks = LinearBlocks | ConvBlocks  # the blocks in which a weight is packed


def packed_conv(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None, blocks: ConvBlocks) -> Tensor:
    """Convolve `x` (batch, in_channels, height, width), bfloat16 or float32.

    The result has the strides of `aten.convolution`'s. `packed` holds the copy of `weight` in that dtype, packed as
    `blocks` say or plain; of `weight` itself only shape and strides are read. No gradient flows: a trained weight
    changes before its packing has paid.
    """
    return PACKED_CONV(x, weight, packed, bias, blocks.stride, blocks.padding, blocks.dilation, blocks.groups)


def convolve_arguments(
    x: Any, weight: Any, packed: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[Any, ...]:
    """The arguments of oneDNN's operator `CONVOLVE` for a `PACKED_CONV`; its result is channels-last if `x` is."""
    return x, packed, bias, padding, stride, dilation, groups, "none", [], ""


@torch.library.impl(_LIBRARY, "packed_conv", "CPU")
@torch.library.impl(_LIBRARY, "packed_conv", "MkldnnCPU")
def _convolve(x: Tensor, weight: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    channels_last = torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
    result: Tensor = CONVOLVE(*convolve_arguments(x, weight, packed, *rest))
    return result.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@torch.library.register_fake(PACKED_CONV, lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    stride, padding, dilation, groups = settings
    return torch.ops.aten.convolution(x, weight.to(x.dtype), bias, stride, padding, dilation, False, [0, 0], groups)
