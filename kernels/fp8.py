"""Linear products of 8-bit floats, and the quantized weights that they read.

A number is quantized as `(x * factor).to(float8)`, with a factor from the largest finite magnitude now, of the whole
tensor or, by rows, of its row. Inputs and weights are e4m3 (3 bits behind the point, up to 448), gradients e5m2 (2
bits, up to 57344) or e4m3; a weight's factor is a power of two. Infinities and NaN become NaN, so a result that isn't
finite in 16 bits isn't here. Products add in float32 (`aten._scaled_mm`); a weight's gradient leaves its product in
float32. By rows, it is a product of 16-bit operands: the sum runs along what the scales differ in.

With M rows, K features in and N out: 2·M·K·N flops for each of the three products, at up to twice the rate of 16 bits.
What is saved for backward is the quantized input, M·K bytes; by rows the input, 2·M·K. The ops become plain ATen where
the graph is differentiated (`DECOMPOSITIONS`), so that Inductor makes quantizing part of the kernels that compute its
operands.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from ampcompile.dtypes import FP8_MULTIPLE, first_to_infinity
from ampcompile.torch_private import dispatcher, marks

from . import tables
from .tables import CARRY_ABOVE_1_75, EXPONENT_SUM, SCALE_BYTES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BY_ROWS = "fp8_rowwise"
GRADIENTS = {"fp8": E5M2, "fp8_e4m3": E4M3, BY_ROWS: E4M3}
"""The recipes, which are values of a policy: the type of gradients in each."""
LEAST = 2.0**-100  # the least magnitude that a factor is made of: the factor and its inverse are normal numbers


def magnitude(wide: Tensor, by_rows: bool = False) -> Tensor:
    """The largest finite magnitude of a float32 tensor, or `LEAST`: of shape (), or for each row, (rows, 1)."""
    if not by_rows and guard_or_false(wide.numel() == 0):
        return wide.new_full((), LEAST)
    finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
    if not by_rows and guard_or_true(wide.numel() == 0):  # a number of rows that the data decides
        finite = torch.nn.functional.pad(finite.flatten(), (0, 1), value=LEAST)
    return (finite.amax(-1, keepdim=True) if by_rows else finite.amax()).clamp(min=LEAST)


def power_below(largest: Tensor) -> Tensor:
    """The largest power of two that leaves a magnitude within e4m3; by integers, as devices divide differently."""
    return (EXPONENT_SUM - (largest.view(torch.int32) + CARRY_ABOVE_1_75 >> 23) << 23).view(torch.float32)


def fitted(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers times a factor, rounded to an 8-bit type: saturated, or NaN if the product isn't finite.

    Asking the product, not the number, spares a mask, which Inductor would write for this and for `magnitude`.
    """
    scaled, limit = wide * factor, torch.finfo(dtype).max
    return torch.where(scaled.isfinite(), scaled.clamp(-limit, limit), torch.nan).to(dtype)


def quantized(x: Tensor, dtype: torch.dtype, by_rows: bool = False) -> tuple[Tensor, Tensor]:
    """`x`, of any floating type and shape, in an 8-bit `dtype`; and the float32 scale to multiply it by.

    The scale is of shape (), or (rows, 1).
    """
    wide, limit = x.float(), torch.finfo(dtype).max
    largest = magnitude(wide, by_rows)
    limits = torch.full_like(largest, limit)  # tensors: a GPU divides by numbers, and numbers, with two roundings
    return fitted(wide, limits / largest, dtype), largest / limits


def buffer_like(weight: Tensor, by_rows: bool = False) -> Tensor:
    """An uninitialized buffer for a quantized (rows, columns) weight: its matrix, the transposed one, and scales."""
    tail = 8 * sum(weight.shape) if by_rows else SCALE_BYTES
    return weight.new_empty(2 * weight.numel() + tail, dtype=E4M3, requires_grad=False)


def parts(
    buffer: Tensor, rows: int, columns: int, *, other: Tensor | None = None, tail: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A buffer's matrix (rows, columns), its transposed one (columns, rows), both e4m3; its scales and magnitudes.

    The matrices hold the same numbers, with one scale and magnitude, (); by rows, each has scales for its own rows:
    first those of the matrix, then of the transposed one, (rows + columns,). Of a weight that FSDP gathers, `buffer` is
    the matrix, `other` the transposed one, and `tail` the scale and the magnitude, (2,).
    """
    if other is not None and tail is not None:
        return buffer, other, tail.select(0, 0), tail.select(0, 1)
    size = rows * columns
    plain, other, tail = buffer.split([size, size, buffer.numel() - 2 * size])
    wide = tail.view(torch.float32)
    scales, largest = (wide.select(0, i) for i in range(2)) if tail.numel() == SCALE_BYTES else wide.chunk(2)
    return plain.view(rows, columns), other.view(columns, rows), scales, largest


@marks.named("amp: quantize_many_")
def quantize_many_(buffers: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Write weights, of any floating type, quantized into their buffers, and raise the buffers' versions; no host sync.

    What would be infinite in bfloat16 counts as infinite. Reads a float32 weight twice and writes 2 bytes a number: 10
    bytes. On a GPU two launches for each device, type and kind of scales, in captures of CUDA graphs for each weight;
    sizes are multiples of 16 there, as `_scaled_mm` asks for.
    """
    for device in dict.fromkeys(buffer.device for buffer in buffers):
        jobs = [(b, w) for b, w in zip(buffers, weights, strict=True) if b.device == device]
        if tables.by_triton(device):
            from .triton import quantize_many as gpu

            gpu.quantize_many_([w.resolve_neg() for _, w in jobs], [b for b, _ in jobs])  # it reads memory
            torch.autograd.graph.increment_version([b for b, _ in jobs])
        else:
            quantize_many_reference_(*zip(*jobs, strict=True))


def quantize_many_reference_(buffers: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """`quantize_many_` in plain torch."""
    with torch.no_grad(), dispatcher.without_modes():
        for buffer, weight in zip(buffers, weights, strict=True):
            plain, other, scale, largest = parts(buffer, *weight.shape)
            wide = _finite(weight)
            if scale.dim():  # by rows, and by columns
                largest.copy_(torch.cat([magnitude(side, True).flatten() for side in (wide, wide.t())]))
                factor = power_below(largest)
                for matrix, side, own in zip((plain, other), (wide, wide.t()), factor.split(weight.shape), strict=True):
                    matrix.copy_(fitted(side, own[:, None], E4M3))
            else:
                largest.copy_(magnitude(wide))
                factor = power_below(largest)
                plain.copy_(fitted(wide, factor, E4M3))
                other.copy_(plain.t())
            scale.copy_(1 / factor)


def _finite(weight: Tensor) -> Tensor:
    """A weight in float32, with NaN for what would be infinite in bfloat16."""
    wide = weight.float()
    return torch.where(wide.abs() < first_to_infinity(torch.bfloat16), wide, torch.nan)


def largest_in(shard: Tensor) -> Tensor:
    """The magnitude of a rank's shard of a weight, float32; the largest of all ranks is the weight's."""
    size = shard.float().abs()
    return torch.where(size < first_to_infinity(torch.bfloat16), size, 0.0).amax().clamp(min=LEAST)


def tail_of(largest: Tensor) -> Tensor:
    """The scale of a weight beside its magnitude, (2,); those of several weights, (weights, 2)."""
    return torch.stack([1 / power_below(largest), largest], -1)


def quantize_shard(shard: Tensor, tail: Tensor) -> Tensor:
    """A shard in e4m3, as bytes, which every backend of collectives knows; `tail`: that of the weight.

    A number beyond its magnitude, written after that was taken, becomes NaN as torch rounds it.
    """
    return (_finite(shard) / tail[0]).to(E4M3).view(torch.uint8)


def parts_like(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized: the matrix, the transposed one, and the tail of a weight that FSDP gathers; see `parts`."""
    plain, other = (weight.new_empty(shape, dtype=E4M3) for shape in (weight.shape, weight.shape[::-1]))
    return plain, other, weight.new_empty(2, dtype=torch.float32)


def quantized_parts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """These parts, of a weight that isn't gathered in fp8."""
    plain, other, _, largest = parts(quantize_weight(weight, False), *weight.shape)
    return plain, other, tail_of(largest)


@torch.library.custom_op("ampcompile::quantize_weight", mutates_args=())
def quantize_weight(weight: Tensor, by_rows: bool) -> Tensor:
    """The buffer of a weight that has no copy across calls."""
    buffer = buffer_like(weight, by_rows)
    quantize_many_([buffer], [weight])
    return buffer


@quantize_weight.register_fake
def _(weight: Tensor, by_rows: bool) -> Tensor:
    return buffer_like(weight, by_rows)


@torch.library.custom_op("ampcompile::quantize", mutates_args=())
def quantize(x: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    """The input of a product, (rows, features), in e4m3, row by row; and its scale."""
    numbers, scale = quantized(x, E4M3, by_rows)
    return numbers.contiguous(), scale


@quantize.register_fake
def _(x: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((x.shape[0], 1) if by_rows else (), dtype=torch.float32)


@torch.library.custom_op("ampcompile::fp8_linear", mutates_args=())
def fp8_linear(
    x: Tensor,
    numbers: Tensor,
    scale: Tensor,
    weight: Tensor,
    buffer: Tensor,
    transposed: bool,
    recipe: str,
    other: Tensor | None = None,
    tail: Tensor | None = None,
) -> Tensor:
    """`x @ weight.t()`, or `x @ weight` if `transposed`, of quantized operands, in the 16-bit type of `x`.

    `x`: (rows, features); `numbers`, `scale`: what `quantize` gives for it; `buffer`: what `quantize_weight` gives for
    `weight`. `x` and `weight` are there for their gradients: the one in its type, the other added up in float32.
    `recipe`: one of `GRADIENTS`. `other`, `tail`: as `parts` says; forward reads one matrix, backward the other.
    """
    side = _operand(x.dtype, parts(buffer, *weight.shape, other=other, tail=tail), weight.shape, transposed)
    return _multiply(numbers, *side, scale, x.dtype, fast=True)


def _operand(
    low: torch.dtype, quantized: tuple[Tensor, ...], shape: Sequence[int], other: bool
) -> tuple[Tensor, Tensor]:
    """Of a weight's parts the matrix, or the transposed one, and its scale, or its rows' scales.

    A scale is NaN if a number would be infinite in float16, and `low` is that: quantizing has asked for bfloat16.
    """
    *matrices, scales, largest = quantized
    if low == torch.float16:
        scales = torch.where(largest < first_to_infinity(low), scales, torch.nan)
    return matrices[other], scales.split(list(shape))[other] if scales.dim() else scales


def _refuse(grad: Tensor) -> None:
    raise RuntimeError("the derivative of a product of 8-bit floats has none itself, as with aten::_scaled_mm")


def _multiply(a: Tensor, b: Tensor, of_b: Tensor, of_a: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """`a @ b.t()`, both stored row by row.

    In float32 on a CPU: oneDNN has such products for few CPUs, and takes up to 500 times as long for two e4m3 there.
    """
    if not a.is_cuda:
        wide = (a.float() @ b.float().t() * of_a * of_b).to(dtype)
        if wide.requires_grad:
            wide.register_hook(_refuse)
        return wide
    scales = of_a.view(-1, 1), of_b.view(1, -1)  # matrices: Inductor can't take a part of a buffer as a number
    result: Tensor = torch.ops.aten._scaled_mm.default(a, b.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
    return result


def _transpose(x: Tensor) -> Tensor:
    return torch.clone(x.t(), memory_format=torch.contiguous_format)


@fp8_linear.register_fake
def _(
    x: Tensor, numbers: Tensor, scale: Tensor, weight: Tensor, buffer: Tensor, transposed: bool, recipe: str, *_: Any
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 0])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, numbers, scale, weight, buffer, ctx.transposed, ctx.recipe, other, tail = inputs
    ctx.save_for_backward(*((x, None) if ctx.recipe == BY_ROWS else (numbers, scale)), buffer, other, tail)
    ctx.dtypes, ctx.shape = (x.dtype, weight.dtype), weight.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved, scale, buffer, other, tail = ctx.saved_tensors
    low, of_type = ctx.dtypes
    by_rows = ctx.recipe == BY_ROWS
    grads, of_grad = quantized(grad.contiguous(), GRADIENTS[ctx.recipe], by_rows)
    to_x = to_weight = None
    if ctx.needs_input_grad[0]:
        side = _operand(low, parts(buffer, *ctx.shape, other=other, tail=tail), ctx.shape, not ctx.transposed)
        to_x = _multiply(grads, *side, of_grad, low)
    if ctx.needs_input_grad[3]:
        if by_rows:
            to_weight = saved.t() @ grad if ctx.transposed else grad.t() @ saved
        elif guard_or_false(saved.shape[0] % FP8_MULTIPLE == 0):  # of rows that vary: a graph for each answer
            sides = [(grads, of_grad), (saved, scale)]
            (a, of_a), (b, of_b) = reversed(sides) if ctx.transposed else sides
            wide = torch.float32 if of_type not in (torch.bfloat16, torch.float16) else of_type
            to_weight = _multiply(_transpose(a), _transpose(b), of_b, of_a, wide)
        else:
            x = (saved.float() / 512).to(low)  # exact, and no larger than 1
            to_weight = (x.t() @ grad if ctx.transposed else grad.t() @ x).float() * (scale * 512)
        to_weight = to_weight.to(of_type)
    return to_x, None, None, to_weight, None, None, None, None, None


def _without_gradient(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)


fp8_linear.register_autograd(_backward, setup_context=_remember)
for _op in (quantize, quantize_weight):  # `fp8_linear` sends gradients past them
    _op.register_autograd(lambda *_: (None, None), setup_context=_without_gradient)
QUANTIZE_WEIGHT = torch.ops.ampcompile.quantize_weight.default
QUANTIZE = torch.ops.ampcompile.quantize.default
FP8_LINEAR = torch.ops.ampcompile.fp8_linear.default
OPS = QUANTIZE, QUANTIZE_WEIGHT, FP8_LINEAR
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {QUANTIZE: quantize._init_fn, FP8_LINEAR: fp8_linear._init_fn}
