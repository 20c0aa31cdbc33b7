"""`F.linear` by oneDNN, with a weight packed beforehand or plain (CPU).

oneDNN's matrix product reads its second operand in blocks that suit the vector unit. oneDNN packs a plain weight at
every call, and uses a packed one directly. The bits of the result are the same. Bytes per call: a plain product reads
and writes the weight once more than a packed one, 4 bytes an element in bfloat16.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias, str? gelu=None) -> Tensor")
MULTIPLY = torch.ops.mkldnn._linear_pointwise.default
PACKED_LINEAR = torch.ops.ampcompile.packed_linear.default
SMALLEST = 64
"""Fewest features in or out of a layer for which oneDNN gives the bits of ATen's product. For fewer, it adds in another
order: one result in 100,000 differs in its last bit if weights are packed; if plain, with a bias, one in a million."""


def available(dtype: torch.dtype) -> bool:
    """True if oneDNN is enabled and multiplies packed weights of a dtype on this machine: float32, or bfloat16."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class LinearBlocks:
    """The blocks of a weight for oneDNN's matrix product."""

    def pack(self, copy: Tensor) -> Tensor:
        """Pack `copy` (out_features, in_features), bfloat16 or float32 on the CPU, as an opaque tensor of oneDNN's."""
        return torch.ops.mkldnn._reorder_linear_weight(copy.detach(), None)


def packed_linear(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    """`x @ weight.t() + bias` (..., out_features) in the dtype of `x` (..., in_features), bfloat16 or float32.

    `packed` holds the copy of `weight` in that dtype, packed or plain; `weight` itself is not read. `gelu`: None, or
    the `approximate` of `F.gelu`, which is then taken of the unrounded sums. No gradient flows: a trained weight
    changes before its packing has paid.
    """
    return PACKED_LINEAR(x, weight, packed, bias, gelu)


def multiply_arguments(x: Any, weight: Any, packed: Any, bias: Any, gelu: str | None = None) -> tuple[Any, ...]:
    """The arguments of oneDNN's operator `MULTIPLY` for a `PACKED_LINEAR`."""
    return x, packed, bias, *(("none", [], "") if gelu is None else ("gelu", [], gelu))


@torch.library.impl(_LIBRARY, "packed_linear", "CPU")
@torch.library.impl(_LIBRARY, "packed_linear", "MkldnnCPU")
def _multiply(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    return MULTIPLY(*multiply_arguments(x, weight, packed, bias, gelu))


@torch.library.register_fake(PACKED_LINEAR, lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
