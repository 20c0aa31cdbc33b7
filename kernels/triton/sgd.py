"""The fused SGD step on the GPU; see `ampcompile.kernels.sgd`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from .. import tables
from .step import factor_of, launch, note, read_weights, refresh_chunk, write_weights


@triton.jit
def update(scalars, grad, weights, buffer, start, mask, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr):
    """Update a block, full if `mask` is None; returns what `write_weights` does. `weights`: see `read_weights`."""
    factor, lr, momentum, new_buffer, nesterov, weight_decay = scalars
    offset = start + tl.arange(0, BLOCK)
    offset4 = tl.max_contiguous(tl.multiple_of(offset, 4), 4)
    g = tl.load(grad + offset4, mask=mask).to(tl.float32) * factor
    p = read_weights(weights, offset, mask)
    g = tl.where(weight_decay != 0.0, g + weight_decay * p, g)
    if MOMENTUM:
        b = momentum * tl.load(buffer + offset, mask=mask) + new_buffer * g
        tl.store(buffer + offset, b, mask=mask)
        g = tl.where(nesterov, g + momentum * b, b)
    p -= lr * g
    return write_weights(weights, start, offset, p, mask)


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
    QUANTIZED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of one tensor per program.

    words: sizes, groups, seven rows (grad, param, momentum_buffer, beside, checksums, quantized, notes: see
    `amp_adam_prepare`), then the six float64 settings of each group.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(words + tensor)
    group = tl.load(words + tensor_count + tensor)
    settings = (words + (2 + 7) * tensor_count + 6 * group).to(tl.pointer_type(tl.float64), bitcast=True)
    row = words + 2 * tensor_count + tensor
    grad_at = tl.load(row)
    param_at = tl.load(row + tensor_count)
    buffer_at = tl.load(row + 2 * tensor_count)
    beside_at = tl.load(row + 3 * tensor_count)
    grad, param = grad_at.to(tl.pointer_type(GRAD)), param_at.to(tl.pointer_type(PARAM))
    buffer, beside = buffer_at.to(tl.pointer_type(tl.float32)), beside_at.to(tl.pointer_type(BESIDE))
    checksums = tl.load(row + 4 * tensor_count).to(tl.pointer_type(tl.int32))
    quantized = tl.load(row + 5 * tensor_count).to(tl.pointer_type(QUANTIZED))  # as aligned as torch allocates
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
            largest = tl.maximum(largest, update(h, grad, hinted, buffer, begin + i, None, MOMENTUM, BLOCK))
    else:
        for i in range(0, CHUNK, BLOCK):
            start = begin + i
            mask = start + tl.arange(0, BLOCK) < size
            largest = tl.maximum(largest, update(h, grad, weights, buffer, start, mask, MOMENTUM, BLOCK))
    note(row + 6 * tensor_count, quantized, size, largest)


def step_(
    table: tables.StepTable,
    settings: np.ndarray,
    lrs: Sequence[float | Tensor],
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[Any, Any],
) -> None:
    """Launch the update's kernels. `table`: see `amp_sgd`."""
    with tables.on(table.grads.device):
        words = tables.step_words(table, settings, lrs, workspace)
        has_multiplier = multiplier is not None
        launch(amp_sgd, table, words, multiplier, found_inf, workspace, "MOMENTUM", HAS_MULTIPLIER=has_multiplier)
