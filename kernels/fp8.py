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

from ampcompile.dtypes import FP8_MULTIPLE, first_to_infinity
from ampcompile.torch_private import dispatcher, profiling

from .triton.tables import ABOVE, CARRY

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TAIL = 16
"""Bytes behind a buffer's two matrices: the scale and the largest finite magnitude, both float32, and nothing."""
LEAST = 2.0**-100
"""The least magnitude that a factor is made of: the factor and its inverse are normal numbers."""


def magnitude(wide: Tensor) -> Tensor:
    """The largest finite magnitude of a float32 tensor, or `LEAST`, float32 of shape ()."""
    if not wide.numel():
        return wide.new_full((), LEAST)
    return torch.where(wide.isfinite(), wide.abs(), 0.0).amax().clamp(min=LEAST)


def power_below(largest: Tensor) -> Tensor:
    """The largest power of two that leaves a magnitude within e4m3; by integers, as devices divide differently."""
    return (ABOVE - (largest.view(torch.int32) + CARRY >> 23) << 23).view(torch.float32)


def fitted(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers times a factor, rounded to an 8-bit type: NaN if they aren't finite, saturated if too large."""
    limit = torch.finfo(dtype).max
    return torch.where(wide.isfinite(), (wide * factor).clamp(-limit, limit), torch.nan).to(dtype)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x`, of any floating type and shape, in an 8-bit `dtype`; and the float32 scale, (), to multiply it by."""
    wide, limit = x.float(), torch.finfo(dtype).max
    largest = magnitude(wide)
    factor = torch.full_like(largest, limit) / largest  # rounded once; a number over a tensor is rounded twice
    return fitted(wide, factor, dtype), largest / limit


def buffer_like(weight: Tensor) -> Tensor:
    """An uninitialized buffer for a quantized (rows, columns) weight: its matrix, the transposed one, and the scale."""
    return weight.new_empty(2 * weight.numel() + TAIL, dtype=E4M3, requires_grad=False)


def parts(buffer: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A buffer's matrix (rows, columns), its transposed one (columns, rows), both e4m3; its scale and magnitude, ()."""
    size = rows * columns
    plain, other, scale, largest, _ = buffer.split([size, size, 4, 4, TAIL - 8])
    scale, largest = (each.view(torch.float32).view(()) for each in (scale, largest))
    return plain.view(rows, columns), other.view(columns, rows), scale, largest


@profiling.named("amp: quantize_many_")
def quantize_many_(buffers: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Write weights, of any floating type, quantized into their buffers, and raise the buffers' versions; no host sync.

    Reads a float32 weight twice and writes 2 bytes a number: 10 bytes. On a GPU two launches for each device and type,
    outside of captures of CUDA graphs; sizes are multiples of 16 there, as `_scaled_mm` asks for.
    """
    for device in dict.fromkeys(buffer.device for buffer in buffers):
        jobs = [(b, w) for b, w in zip(buffers, weights, strict=True) if b.device == device]
        # A capture records the addresses that are arguments of its launches, but doesn't keep a table of them alive.
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            from .triton import quantize_many as gpu

            gpu.quantize_many_([w for _, w in jobs], [b for b, _ in jobs])
            torch.autograd.graph.increment_version([b for b, _ in jobs])
        else:
            quantize_many_reference_(*zip(*jobs, strict=True))


def quantize_many_reference_(buffers: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """`quantize_many_` in plain torch."""
    with torch.no_grad(), dispatcher.without_modes():
        for buffer, weight in zip(buffers, weights, strict=True):
            plain, other, scale, largest = parts(buffer, *weight.shape)
            wide = weight.float()
            largest.copy_(magnitude(wide))
            factor = power_below(largest)
            plain.copy_(fitted(wide, factor, E4M3))
            other.copy_(plain.t())
            scale.copy_(1 / factor)


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
    plain, other, of_weight = _parts_in(x.dtype, buffer, weight.shape)
    return _multiply(numbers, other if turned else plain, scale, of_weight, x.dtype, fast=True)


def _parts_in(low: torch.dtype, buffer: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices and scale for products of a 16-bit type: the scale is NaN if a number would be infinite in it."""
    plain, other, scale, largest = parts(buffer, *shape)
    return plain, other, torch.where(largest < first_to_infinity(low), scale, torch.nan)


def _multiply(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """`a @ b.t()`, both stored row by row."""
    result: Tensor = torch.ops.aten._scaled_mm.default(
        a, b.t(), of_a, of_b, out_dtype=dtype, use_fast_accum=fast and a.is_cuda
    )
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
    low, of_type = ctx.dtypes
    plain, other, of_weight = _parts_in(low, buffer, ctx.shape)
    grads, of_grad = quantized(grad.contiguous(), E5M2)
    to_x = to_weight = None
    if ctx.needs_input_grad[0]:
        to_x = _multiply(grads, plain if ctx.turned else other, of_grad, of_weight, low)
    if ctx.needs_input_grad[3]:
        if statically_known_true(numbers.shape[0] % FP8_MULTIPLE == 0):
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
