"""`F.linear` with a float32 weight, rounded to the low-precision type on its way into the product.

For weights that can't have a copy, because the graph computes them or they change without a version bump. A separate
cast reads 4 bytes an element, writes 2 and reads them again; this kernel reads the weight once, and backward saves no
new tensor. The gradient of the weight is the product's float32 sums, never rounded to 16 bits.

With N rows of x and a weight of O by I: 2·N·O·I flops; 4·O·I + 2·N·(I + O) bytes, the weight's once more for every
`ROWS_SHARED` rows. The gradient of x moves as much; that of the weight writes 4·O·I.
"""

from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private.dispatcher import triton_op

from .usable import on_device_of

ROWS_FEW = 16
"""Rows of x up to which the product is bound by the weight's bytes."""
ROWS_SHARED = 1024
"""Rows of x that share one read of the weight."""


@triton_op("ampcompile::linear_cast")
def linear_cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.t() + bias` in the type of `x`, to which weight and bias are rounded; summed in float32.

    `x`: (..., in_features), float16 or bfloat16. `weight`: (out_features, in_features), float32, of any strides.
    `bias`: (out_features), of any floating type. The result is contiguous. Gradients have their operand's type.
    """
    if not x.is_cuda:
        return linear_cast_reference(x, weight, bias)
    from .triton import linear_cast as gpu

    rows = x.reshape(-1, x.shape[-1])
    with on_device_of(rows):
        return gpu.multiply(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def linear_cast_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_cast` in plain torch."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` (rows, out_features) transposed @ `x` (rows, in_features), 16-bit, in the float32 it is summed in."""
    if grad.is_cuda:
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    return grad.float().t() @ x.float()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])
    to_x = linear_cast(grad, weight.t(), None) if wants_x else None
    to_weight = weight_gradient(rows, x.reshape(-1, x.shape[-1])) if wants_weight else None
    return to_x, to_weight, rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None


linear_cast.register_autograd(_backward, setup_context=_remember)
LINEAR_CAST = torch.ops.ampcompile.linear_cast.default
