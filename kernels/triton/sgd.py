"""The fused SGD step on the GPU; see `ampcompile.kernels.sgd`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .step import launch, refresh


@triton.jit
def update(scalars, grad, param, buffer, copy, offset, mask, MOMENTUM: tl.constexpr, COPY: tl.constexpr):
    """Update a block of elements; `mask` is None if the block is full."""
    factor, lr, momentum, new_buffer, nesterov, weight_decay = scalars
    offset4 = tl.max_contiguous(tl.multiple_of(offset, 4), 4)
    g = tl.load(grad + offset4, mask=mask).to(tl.float32) * factor
    p = tl.load(param + offset, mask=mask)
    g = tl.where(weight_decay != 0.0, g + weight_decay * p, g)
    if MOMENTUM:
        b = momentum * tl.load(buffer + offset, mask=mask) + new_buffer * g
        tl.store(buffer + offset, b, mask=mask)
        g = tl.where(nesterov, g + momentum * b, b)
    p -= lr * g
    tl.store(param + offset, p, mask=mask)
    refresh(copy, offset4, p, mask, COPY)


@triton.jit(do_not_specialize=["tensor_count"])
def amp_sgd(
    words,
    chunks,
    multiplier,
    found_inf,
    tensor_count,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of one tensor per program.

    words: sizes, groups, four rows of addresses (grad, param, momentum_buffer, copy), then the six float64
    settings of each group.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(words + tensor)
    group = tl.load(words + tensor_count + tensor)
    settings = (words + 6 * tensor_count + 6 * group).to(tl.pointer_type(tl.float64), bitcast=True)
    row = words + 2 * tensor_count + tensor
    grad_at = tl.load(row)
    param_at = tl.load(row + tensor_count)
    buffer_at = tl.load(row + 2 * tensor_count)
    copy_at = tl.load(row + 3 * tensor_count)
    grad, param = grad_at.to(tl.pointer_type(GRAD)), param_at.to(tl.pointer_type(tl.float32))
    buffer, copy = buffer_at.to(tl.pointer_type(tl.float32)), copy_at.to(tl.pointer_type(COPY))
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
    aligned = ((grad_at | param_at | buffer_at | copy_at) & 15) == 0
    if skip:
        if COPY.primitive_bitwidth == 16:
            for i in range(0, CHUNK, BLOCK):
                offset = begin + i + tl.arange(0, BLOCK)
                refresh(copy, offset, tl.load(param + offset, mask=offset < size), offset < size, COPY)
    elif whole & aligned:
        # The hints apply to these pointers only, and only to pointers: a cast from an integer loses them.
        grad, param = tl.multiple_of(grad, 16), tl.multiple_of(param, 16)
        buffer, copy = tl.multiple_of(buffer, 16), tl.multiple_of(copy, 16)
        for i in range(0, CHUNK, BLOCK):
            offset = begin + i + tl.arange(0, BLOCK)
            update(h, grad, param, buffer, copy, offset, None, MOMENTUM, COPY)
    else:
        for i in range(0, CHUNK, BLOCK):
            offset = begin + i + tl.arange(0, BLOCK)
            update(h, grad, param, buffer, copy, offset, offset < size, MOMENTUM, COPY)


def step_(
    table: tables.StepTable,
    settings: np.ndarray,
    lrs: Sequence[float | Tensor],
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[Any, Any],
) -> None:
    """Launch the update's kernels. `table`: see `amp_sgd`."""
    with tables.on(table.device):
        words = tables.step_words(table, settings, lrs, workspace)
        has_multiplier = multiplier is not None
        launch(amp_sgd, table, words, multiplier, found_inf, workspace, "MOMENTUM", HAS_MULTIPLIER=has_multiplier)
