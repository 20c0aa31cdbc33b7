"""`F.linear` by oneDNN, with a weight that it may have packed beforehand (CPU).

oneDNN's matrix product reads its second operand in blocks that suit the vector unit. Given a plain weight it makes
that copy at every call; given a packed one it starts to multiply. The bits of the result are the same. Bytes per
call: the plain product reads and writes the weight once more than the packed one, 4 bytes an element in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias) -> Tensor")
MULTIPLY = torch.ops.mkldnn._linear_pointwise.default
PACKED_LINEAR = torch.ops.ampcompile.packed_linear.default


def available(dtype: torch.dtype) -> bool:
    """Whether oneDNN is not turned off, and multiplies packed weights of a dtype here: float32, or bfloat16."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class LinearBlocks:
    """The blocks that oneDNN's matrix product reads a weight in."""

    def pack(self, copy: Tensor) -> Tensor:
        """`copy` (out_features, in_features), bfloat16 or float32 on the CPU, as an opaque tensor of oneDNN's."""
        return torch.ops.mkldnn._reorder_linear_weight(copy.detach(), None)


def packed_linear(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.t() + bias` (..., out_features) in the dtype of `x` (..., in_features), bfloat16 or float32.

    `packed` holds the copy of `weight` in that dtype, packed or plain; `weight` itself is not read. No gradient flows:
    a weight that is trained changes before packing it has paid.
    """
    return PACKED_LINEAR(x, weight, packed, bias)


def packed_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same numbers without packing."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def multiply_arguments(x: Any, weight: Any, packed: Any, bias: Any) -> tuple[Any, ...]:
    """What oneDNN's operator `MULTIPLY` is called with for a `PACKED_LINEAR`."""
    return x, packed, bias, "none", [], ""


@torch.library.impl(_LIBRARY, "packed_linear", "CPU")
@torch.library.impl(_LIBRARY, "packed_linear", "MkldnnCPU")
def _multiply(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return MULTIPLY(*multiply_arguments(x, weight, packed, bias))


@torch.library.register_fake(PACKED_LINEAR, lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
