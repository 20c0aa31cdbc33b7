"""`F.linear` with a low-precision weight that oneDNN has packed beforehand (CPU).

oneDNN's matrix product reads its second operand in blocks that suit the vector unit. Given a plain weight it makes
that copy at every call; given a packed one it starts to multiply. The bits of the result are the same. Bytes per
call: the plain product reads and writes the weight once more than the packed one, 4 bytes an element in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor packed, Tensor packed_t, Tensor? bias) -> Tensor")
MULTIPLY = torch.ops.mkldnn._linear_pointwise.default
PACKED_LINEAR = torch.ops.ampcompile.packed_linear.default


def available(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies packed weights of a dtype."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(copy: Tensor) -> Tensor:
    """`copy` (out_features, in_features), bfloat16 on the CPU, as an opaque tensor of oneDNN's."""
    return torch.ops.mkldnn._reorder_linear_weight(copy.detach(), None)


def packed_linear(x: Tensor, weight: Tensor, packed: Tensor, packed_t: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.t() + bias` in the dtype of `x` (..., in_features), bfloat16; the result is (..., out_features).

    `packed` and `packed_t` hold the bfloat16 copy of `weight` and its transpose, packed: forward reads the first,
    the gradient of `x` the second. `weight` itself is not read; its gradient is computed in bfloat16, as autocast
    does, and cast to its dtype.
    """
    return PACKED_LINEAR(x, weight, packed, packed_t, bias)


def packed_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same numbers without packing."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def multiply_arguments(x: Any, weight: Any, packed: Any, packed_t: Any, bias: Any) -> tuple[Any, ...]:
    """What oneDNN's operator `MULTIPLY` is called with for a `PACKED_LINEAR`: forward or backward, no epilogue."""
    return x, packed, bias, "none", [], ""


@torch.library.impl(_LIBRARY, "packed_linear", "CPU")
@torch.library.impl(_LIBRARY, "packed_linear", "MkldnnCPU")
def _forward(x: Tensor, weight: Tensor, packed: Tensor, packed_t: Tensor, bias: Tensor | None) -> Tensor:
    return MULTIPLY(*multiply_arguments(x, weight, packed, packed_t, bias))


@torch.library.register_fake(PACKED_LINEAR, lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, packed: Tensor, packed_t: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, packed, packed_t, _ = inputs
    ctx.save_for_backward(x, packed, packed_t)
    ctx.dtype = weight.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, packed, packed_t = ctx.saved_tensors
    wants_x, wants_weight, _, _, wants_bias = ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])
    to_x = PACKED_LINEAR(grad, packed_t, packed_t, packed, None) if wants_x else None
    to_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(ctx.dtype) if wants_weight else None
    return to_x, to_weight, None, None, rows.sum(0) if wants_bias else None


torch.library.register_autograd(PACKED_LINEAR, _backward, setup_context=_remember, lib=_LIBRARY)
