"""Linear products of 8-bit floats, and the quantized weights that they read.

A number is quantized as `(x * factor).to(float8)`, with one factor for the whole tensor from its largest finite
magnitude now. Inputs and weights are e4m3 (3 bits behind the point, up to 448), gradients e5m2 (2 bits, up to 57344);
a weight's factor is a power of two. Infinities and NaN become NaN, so a result that isn't finite in 16 bits isn't
here. Products add in float32 (`aten._scaled_mm`); a weight's gradient leaves its product in float32.

With M rows, K features in and N out: 2·M·K·N flops for each of the three products, at up to twice the rate of 16 bits.
What is saved for backward is the quantized input, M·K bytes. The ops become plain ATen where the graph is
differentiated (`DECOMPOSITIONS`), so that Inductor makes quantizing part of the kernels that compute its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Of which features are to be multiples: what GPUs' products read at a time."""
TAIL = 16
"""Bytes behind a buffer's two matrices: the scale, of float32, and nothing."""
LEAST = 1e-30
"""The least magnitude that a factor is made of: the factor and its inverse are normal numbers."""
_EXPONENT = 0x7F800000


def quantized(x: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`x`, of a floating type and any shape, in an 8-bit `dtype`; and the float32 scale to multiply it by, of shape ().

    What is larger than the scale allows is saturated; with the current magnitude as the limit, only by rounding.
    """
    wide, limit = x.float(), torch.finfo(dtype).max
    finite = wide.isfinite()
    largest = torch.where(finite, wide.abs(), 0.0).amax() if x.numel() else wide.new_zeros(())
    largest = largest.clamp(min=LEAST)
    factor = limit / largest
    if power_of_two:
        factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
    fitted = torch.where(finite, (wide * factor).clamp(-limit, limit), torch.nan)
    return fitted.to(dtype), 1 / factor if power_of_two else largest / limit


def buffer_like(weight: Tensor) -> Tensor:
    """An uninitialized buffer for a quantized (rows, columns) weight: its matrix, the transposed one, and the scale."""
    return weight.new_empty(2 * weight.numel() + TAIL, dtype=E4M3, requires_grad=False)


def parts(buffer: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A buffer's matrix (rows, columns), its transposed one (columns, rows), both e4m3, and its float32 scale."""
    size = rows * columns
    plain, other, scale, _ = buffer.split([size, size, 4, TAIL - 4])
    return plain.view(rows, columns), other.view(columns, rows), scale.view(torch.float32).view(())


def quantize_many_(buffers: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Write weights, of any floating type, quantized into their buffers, and raise the buffers' versions."""
    with torch.no_grad():
        for buffer, weight in zip(buffers, weights, strict=True):
            plain, turned, scale = parts(buffer, *weight.shape)
            numbers, dequantize = quantized(weight, E4M3, power_of_two=True)
            plain.copy_(numbers)
            turned.copy_(numbers.t())
            scale.copy_(dequantize)


@torch.library.custom_op("ampcompile::quantize_weight", mutates_args=())
def quantize_weight(weight: Tensor) -> Tensor:
    """The buffer of a weight that has no copy across calls."""
    buffer = buffer_like(weight)
    quantize_many_([buffer], [weight])
    return buffer


@quantize_weight.register_fake
def _(weight: Tensor) -> Tensor:
    return buffer_like(weight)


@torch.library.custom_op("ampcompile::quantize", mutates_args=())
def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The input of a product, (rows, features), in e4m3, row by row; and its scale."""
    numbers, scale = quantized(x, E4M3)
    return numbers.contiguous(), scale


@quantize.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("ampcompile::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, numbers: Tensor, scale: Tensor, weight: Tensor, buffer: Tensor, turned: bool) -> Tensor:
    """`x @ weight.t()`, or `x @ weight` if `turned`, of quantized operands, in the 16-bit type of `x`.

    `x`: (rows, features); `numbers`, `scale`: what `quantize` gives for it; `buffer`: what `quantize_weight` gives for
    `weight`. `x` and `weight` are there for their gradients: the one in its type, the other added up in float32.
    """
    return _product(x, numbers, scale, weight, buffer, turned)


def _product(x: Tensor, numbers: Tensor, scale: Tensor, weight: Tensor, buffer: Tensor, turned: bool) -> Tensor:
    plain, other, of_weight = parts(buffer, *weight.shape)
    return _multiply(numbers, other if turned else plain, scale, of_weight, x.dtype, fast=True)


def _multiply(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """`a @ b.t()`, both stored row by row."""
    result: Tensor = torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=dtype, use_fast_accum=fast and a.is_cuda)
    return result


def _turn(x: Tensor) -> Tensor:
    return torch.clone(x.t(), memory_format=torch.contiguous_format)


@fp8_linear.register_fake
def _(x: Tensor, numbers: Tensor, scale: Tensor, weight: Tensor, buffer: Tensor, turned: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if turned else 0])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, numbers, scale, weight, buffer, ctx.turned = inputs
    ctx.save_for_backward(numbers, scale, buffer)
    ctx.dtypes, ctx.shape = (x.dtype, weight.dtype), weight.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    numbers, scale, buffer = ctx.saved_tensors
    plain, other, of_weight = parts(buffer, *ctx.shape)
    low, of_type = ctx.dtypes
    grads, of_grad = quantized(grad.contiguous(), E5M2)
    to_x = to_weight = None
    if ctx.needs_input_grad[0]:
        to_x = _multiply(grads, plain if ctx.turned else other, of_grad, of_weight, low)
    if ctx.needs_input_grad[3]:
        if statically_known_true(numbers.shape[0] % MULTIPLE == 0):
            sides = [(grads, of_grad), (numbers, scale)]
            (a, of_a), (b, of_b) = reversed(sides) if ctx.turned else sides
            wide = torch.float32 if of_type not in (torch.bfloat16, torch.float16) else of_type
            to_weight = _multiply(_turn(a), _turn(b), of_a, of_b, wide)
        else:
            x = (numbers.float() / 512).to(low)  # exact, and no larger than 1
            to_weight = (x.t() @ grad if ctx.turned else grad.t() @ x).float() * (scale * 512)
        to_weight = to_weight.to(of_type)
    return to_x, None, None, to_weight, None, None


def _without_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)


fp8_linear.register_autograd(_backward, setup_context=_remember)
for _op in (quantize, quantize_weight):  # `fp8_linear` sends gradients past them
    _op.register_autograd(lambda *_: None, setup_context=_without_gradient)
QUANTIZE_WEIGHT = torch.ops.ampcompile.quantize_weight.default
QUANTIZE = torch.ops.ampcompile.quantize.default
FP8_LINEAR = torch.ops.ampcompile.fp8_linear.default
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {QUANTIZE: quantize._init_fn, FP8_LINEAR: _product}
