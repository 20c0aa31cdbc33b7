"""The fused steps of Adam and SGD on the GPU; see `ampcompile.kernels.adam` and `ampcompile.kernels.sgd`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .launching import Constants, start
from .states import SPAN, coding_of, place_of, random_words, read_moment, write_moment
from .step import factor_of, launch, note, read_weights, refresh_chunk, write_weights


@triton.jit(do_not_specialize=["tensor_count"])
def amp_adam_prepare(
    words,
    scalars,
    multiplier,
    found_inf,
    tensor_count,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the step unless it is skipped, and compute in float64 the scalars of each tensor's update.

    words: sizes, groups, fourteen rows (grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, step, the four of
    `ampcompile.kernels.states.Coding`, beside, checksums, quantized weights, notes on the latter, see
    `quantize_many.NOTES`); then the seven float64 settings of each group. `beside` the parameters: their copies, or
    what `ampcompile.kernels.masters` keeps.
    """
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = tensor < tensor_count
    settings = words + (2 + 14) * tensor_count + 7 * tl.load(words + tensor_count + tensor, mask=valid, other=0)
    lr = tl.load(settings, mask=valid, other=0).to(tl.float64, bitcast=True)
    beta1 = tl.load(settings + 1, mask=valid, other=0).to(tl.float64, bitcast=True)
    beta2 = tl.load(settings + 2, mask=valid, other=0).to(tl.float64, bitcast=True)
    epsilon = tl.load(settings + 3, mask=valid, other=0).to(tl.float64, bitcast=True)
    weight_decay = tl.load(settings + 4, mask=valid, other=0).to(tl.float64, bitcast=True)
    decoupled = tl.load(settings + 5, mask=valid, other=0) != 0
    maximize = tl.load(settings + 6, mask=valid, other=0) != 0
    factor = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_MULTIPLIER:
        factor = factor * tl.load(multiplier)
    counts = valid
    if HAS_FOUND_INF:
        counts = valid & (tl.load(found_inf + 0 * tensor) == 0.0)
    address = tl.load(words + (2 + 5) * tensor_count + tensor, mask=valid, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(address, mask=valid, other=0.0) + 1.0
    tl.store(address, step, mask=counts)
    correction1 = 1.0 - tl.exp(step.to(tl.float64) * tl.log(beta1))
    correction2 = 1.0 - tl.exp(step.to(tl.float64) * tl.log(beta2))
    row = scalars + 9 * tensor
    tl.store(row, tl.where(maximize, -factor, factor), mask=valid)
    tl.store(row + 1, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=valid)
    tl.store(row + 2, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=valid)
    tl.store(row + 3, beta2.to(tl.float32), mask=valid)
    tl.store(row + 4, (1.0 - beta1).to(tl.float32), mask=valid)
    tl.store(row + 5, (1.0 - beta2).to(tl.float32), mask=valid)
    tl.store(row + 6, (lr / correction1).to(tl.float32), mask=valid)
    tl.store(row + 7, tl.sqrt(correction2).to(tl.float32), mask=valid)
    tl.store(row + 8, epsilon.to(tl.float32), mask=valid)


@triton.jit
def update_adam(scalars, grad, weights, states, coding, start, at, mask, AMSGRAD: tl.constexpr):
    """Update a block, full if `mask` is None; returns what `write_weights` does. `at`: see `read_weights`."""
    factor, l2, keep, beta2, new_mean, new_square, step_size, root_correction, epsilon = scalars
    mean, square, peak = states
    index, offset, offset4 = at
    g = tl.load(grad + offset4, mask=mask).to(tl.float32) * factor
    p = read_weights(weights, at, mask)
    m = read_moment(mean, coding[0], start, offset4, mask, False, 2)
    v = read_moment(square, coding[0], start, offset4, mask, True, 2)
    g = tl.where(l2 != 0.0, g + l2 * p, g)
    m = tl.where(new_mean < 0.5, m + new_mean * (g - m), g - (g - m) * (1.0 - new_mean))  # torch's lerp
    v = beta2 * v + new_square * g * g
    largest = v
    if AMSGRAD:
        largest = tl.maximum(tl.load(peak + offset, mask=mask), v, propagate_nan=tl.PropagateNan.ALL)
        tl.store(peak + offset, largest, mask=mask)
    p = p * keep - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(largest), root_correction) + epsilon)
    bits = random_words(coding[2], offset)
    write_moment(mean, coding[0], index, offset4, mask, m, bits, coding[2], False, 2)
    write_moment(square, coding[0], index, offset4, mask, v, bits, coding[2], True, 2)
    return write_weights(weights, start, at, p, bits, mask)


@triton.jit
def block_at(start, BLOCK: tl.constexpr):
    """Where a block lies whose elements follow one another; see `read_weights`."""
    offset = start + tl.arange(0, BLOCK)
    # Four elements a thread for tensors of 16 and 8 bits too: then threads don't exchange elements.
    return offset, offset, tl.max_contiguous(tl.multiple_of(offset, 4), 4)


@triton.jit
def masked_block_at(start, size, coding, STATE: tl.constexpr, BLOCK: tl.constexpr):
    """The same of any block, with a mask."""
    index, offset, mask = place_of(start, coding[1], size, STATE, BLOCK)
    offset4 = offset
    if tl.int8 != STATE:
        offset4 = tl.max_contiguous(tl.multiple_of(offset, 4), 4)
    return (index, offset, offset4), mask


@triton.jit(do_not_specialize=["tensor_count"])
def amp_adam(
    words,
    chunks,
    scalars,
    found_inf,
    tensor_count,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    BESIDE: tl.constexpr,
    STATE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of one tensor per program."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(words + tensor)
    row = words + 2 * tensor_count + tensor
    grad_at = tl.load(row)
    param_at = tl.load(row + tensor_count)
    mean_at = tl.load(row + 2 * tensor_count)
    square_at = tl.load(row + 3 * tensor_count)
    peak_at = tl.load(row + 4 * tensor_count)
    beside_at = tl.load(row + 10 * tensor_count)
    grad, param = grad_at.to(tl.pointer_type(GRAD)), param_at.to(tl.pointer_type(PARAM))
    squares: tl.constexpr = tl.uint8 if tl.int8 == STATE else STATE
    mean, square = mean_at.to(tl.pointer_type(STATE)), square_at.to(tl.pointer_type(squares))
    peak = peak_at.to(tl.pointer_type(tl.float32))
    beside = beside_at.to(tl.pointer_type(BESIDE))
    step = tl.load(tl.load(row + 5 * tensor_count).to(tl.pointer_type(tl.float32)))
    beta1 = tl.load(words + (2 + 14) * tensor_count + 7 * tl.load(words + tensor_count + tensor) + 1)
    beta1 = beta1.to(tl.float64, bitcast=True)
    coding = coding_of(row + 6 * tensor_count, tensor_count, step, beta1)
    checksums = tl.load(row + 11 * tensor_count).to(tl.pointer_type(tl.int32))
    quantized = tl.load(row + 12 * tensor_count).to(tl.pointer_type(QUANTIZED))  # as aligned as torch allocates
    weights = (param, beside, checksums, quantized, factor_of(quantized, size))
    skip = False
    if HAS_FOUND_INF:
        skip = tl.load(found_inf) != 0.0
    whole = begin + CHUNK <= size
    if tl.int8 == STATE:
        whole = whole & (coding[1] % SPAN == 0)
    aligned = ((grad_at | param_at | mean_at | square_at | peak_at | beside_at) & 15) == 0
    tensor_scalars = scalars + 9 * tensor
    h = (
        tl.load(tensor_scalars),
        tl.load(tensor_scalars + 1),
        tl.load(tensor_scalars + 2),
        tl.load(tensor_scalars + 3),
        tl.load(tensor_scalars + 4),
        tl.load(tensor_scalars + 5),
        tl.load(tensor_scalars + 6),
        tl.load(tensor_scalars + 7),
        tl.load(tensor_scalars + 8),
    )
    largest = tl.zeros([BLOCK], tl.int32)
    if skip:
        largest = refresh_chunk(weights, begin, size, CHUNK, BLOCK)
    elif whole & aligned:
        # The hints apply to these pointers only, and only to pointers: a cast from an integer loses them.
        grad, param, beside = tl.multiple_of(grad, 16), tl.multiple_of(param, 16), tl.multiple_of(beside, 16)
        mean, square, peak = tl.multiple_of(mean, 16), tl.multiple_of(square, 16), tl.multiple_of(peak, 16)
        hinted = (param, beside, checksums, tl.multiple_of(quantized, 16), weights[4])
        for i in range(0, CHUNK, BLOCK):
            start, at = begin + i, block_at(begin + i, BLOCK)
            magnitude = update_adam(h, grad, hinted, (mean, square, peak), coding, start, at, None, AMSGRAD)
            largest = tl.maximum(largest, magnitude)
    else:
        for i in range(0, CHUNK, BLOCK):
            at, mask = masked_block_at(begin + i, size, coding, STATE, BLOCK)
            magnitude = update_adam(h, grad, weights, (mean, square, peak), coding, begin + i, at, mask, AMSGRAD)
            largest = tl.maximum(largest, magnitude)
    note(row + 13 * tensor_count, quantized, size, largest)


@triton.jit
def update_sgd(scalars, grad, weights, buffer, coding, start, at, mask, MOMENTUM: tl.constexpr):
    """Update a block, full if `mask` is None; returns what `write_weights` does. `at`: see `read_weights`."""
    factor, lr, momentum, new_buffer, nesterov, weight_decay = scalars
    index, offset, offset4 = at
    g = tl.load(grad + offset4, mask=mask).to(tl.float32) * factor
    p = read_weights(weights, at, mask)
    g = tl.where(weight_decay != 0.0, g + weight_decay * p, g)
    bits = random_words(coding[2], offset)
    if MOMENTUM:
        b = momentum * read_moment(buffer, coding[0], start, offset4, mask, False, 1) + new_buffer * g
        write_moment(buffer, coding[0], index, offset4, mask, b, bits, coding[2], False, 1)
        g = tl.where(nesterov, g + momentum * b, b)
    p -= lr * g
    return write_weights(weights, start, at, p, bits, mask)


@triton.jit(do_not_specialize=["tensor_count"])
def amp_sgd(
    words,
    chunks,
    multiplier,
    found_inf,
    tensor_count,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    BESIDE: tl.constexpr,
    STATE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of one tensor per program.

    words: sizes, groups, twelve rows (grad, param, momentum_buffer, step, coding, beside, checksums, quantized, notes:
    see `amp_adam_prepare`), then the six float64 settings of each group.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(words + tensor)
    group = tl.load(words + tensor_count + tensor)
    settings = (words + (2 + 12) * tensor_count + 6 * group).to(tl.pointer_type(tl.float64), bitcast=True)
    row = words + 2 * tensor_count + tensor
    grad_at = tl.load(row)
    param_at = tl.load(row + tensor_count)
    buffer_at = tl.load(row + 2 * tensor_count)
    beside_at = tl.load(row + 8 * tensor_count)
    grad, param = grad_at.to(tl.pointer_type(GRAD)), param_at.to(tl.pointer_type(PARAM))
    buffer, beside = buffer_at.to(tl.pointer_type(STATE)), beside_at.to(tl.pointer_type(BESIDE))
    step = tl.full([], 0.0, tl.float32)
    if (tl.float32 != STATE) or (tl.int8 == BESIDE):
        step = tl.load(tl.load(row + 3 * tensor_count).to(tl.pointer_type(tl.float32)))
    coding = coding_of(row + 4 * tensor_count, tensor_count, step, tl.load(settings + 1))
    checksums = tl.load(row + 9 * tensor_count).to(tl.pointer_type(tl.int32))
    quantized = tl.load(row + 10 * tensor_count).to(tl.pointer_type(QUANTIZED))  # as aligned as torch allocates
    weights = (param, beside, checksums, quantized, factor_of(quantized, size))
    factor = tl.full([], 1.0, tl.float32)
    if HAS_MULTIPLIER:
        factor = tl.load(multiplier)
    h = (
        tl.where(tl.load(settings + 5) != 0.0, -factor, factor),
        tl.load(settings).to(tl.float32),
        tl.load(settings + 1).to(tl.float32),
        (1.0 - tl.load(settings + 2)).to(tl.float32),
        tl.load(settings + 3) != 0.0,
        tl.load(settings + 4).to(tl.float32),
    )
    skip = False
    if HAS_FOUND_INF:
        skip = tl.load(found_inf) != 0.0
    whole = begin + CHUNK <= size
    if tl.int8 == STATE:
        whole = whole & (coding[1] % SPAN == 0)
    aligned = ((grad_at | param_at | buffer_at | beside_at) & 15) == 0
    largest = tl.zeros([BLOCK], tl.int32)
    if skip:
        largest = refresh_chunk(weights, begin, size, CHUNK, BLOCK)
    elif whole & aligned:
        # The hints apply to these pointers only, and only to pointers: a cast from an integer loses them.
        grad, param = tl.multiple_of(grad, 16), tl.multiple_of(param, 16)
        buffer, beside = tl.multiple_of(buffer, 16), tl.multiple_of(beside, 16)
        hinted = (param, beside, checksums, tl.multiple_of(quantized, 16), weights[4])
        for i in range(0, CHUNK, BLOCK):
            start, at = begin + i, block_at(begin + i, BLOCK)
            largest = tl.maximum(largest, update_sgd(h, grad, hinted, buffer, coding, start, at, None, MOMENTUM))
    else:
        for i in range(0, CHUNK, BLOCK):
            at, mask = masked_block_at(begin + i, size, coding, STATE, BLOCK)
            magnitude = update_sgd(h, grad, weights, buffer, coding, begin + i, at, mask, MOMENTUM)
            largest = tl.maximum(largest, magnitude)
    note(row + 11 * tensor_count, quantized, size, largest)


@functools.cache
def _constants(has_multiplier: bool, has_found_inf: bool) -> Constants:
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Constants(HAS_MULTIPLIER=has_multiplier, HAS_FOUND_INF=has_found_inf, BLOCK=128, **options)


def step_(
    name: str,
    table: tables.StepTable,
    settings: np.ndarray,
    lrs: Sequence[float | Tensor],
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[Any, Any],
) -> None:
    """Launch the update's kernels of `adam` or `sgd`, before those of Adam a small one for the step counts.

    `table`: see `amp_adam_prepare` and `amp_sgd`.
    """
    count, device, has_multiplier = len(table.grads.numels), table.grads.device, multiplier is not None
    with tables.on(device):
        words = tables.step_words(table, settings, lrs, workspace)
        if name == "sgd":
            launch(amp_sgd, table, words, multiplier, found_inf, workspace, "MOMENTUM", HAS_MULTIPLIER=has_multiplier)
            return
        scalars = None if tables.capturing(device) else workspace.get("adam scalars")
        if scalars is None or scalars.shape[0] < 9 * count:
            scalars = torch.empty(9 * count, dtype=torch.float32, device=device)
        if not tables.capturing(device):  # a CUDA graph has scalars of its own, in its own memory pool
            workspace["adam scalars"] = scalars
        factors = scalars if multiplier is None else multiplier, scalars if found_inf is None else found_inf
        constants = _constants(has_multiplier, found_inf is not None)
        start(amp_adam_prepare, -(-count // 128), (words, scalars, *factors), (count,), constants, device)
        launch(amp_adam, table, words, scalars, found_inf, workspace, "AMSGRAD")
