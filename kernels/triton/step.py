"""Shared code of the optimizers' steps: writing the weights' 16-bit copies, and launching the kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tables

BLOCK = 512  # with 4 warps: 4 elements of each tensor a thread, one 16-byte access
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
NO_COPY = tl.float32


@triton.jit
def refresh(copy, offset, weight, mask, COPY: tl.constexpr):
    """Round weights into their copy, if any: address 0 means no copy, a COPY of float32 no copies at all."""
    if COPY.primitive_bitwidth == 32:
        return
    if copy.to(tl.int64) != 0:
        tl.store(copy + offset, weight.to(COPY), mask=mask)


def launch(
    kernel: Any,
    table: tables.StepTable,
    words: Tensor,
    factors: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[Any, Any],
    optional: str,
    **constants: bool,
) -> None:
    """Launch the kernel once for each combination of types, with a program per chunk.

    `optional`: the kernel's constant for the optional state. Another pointer stands in for one that is None.
    """
    for grad, copy, state, chosen in table.kinds:
        pieces = tables.chunks(table.numels, chosen, table.device, workspace)
        if pieces.shape[0]:
            kernel[(pieces.shape[0],)](
                words,
                pieces,
                words if factors is None else factors,
                words if found_inf is None else found_inf,
                len(table.numels),
                GRAD=TYPES[grad],
                COPY=NO_COPY if copy is None else TYPES[copy],
                HAS_FOUND_INF=found_inf is not None,
                CHUNK=tables.CHUNK,
                BLOCK=BLOCK,
                num_warps=4,
                enable_fp_fusion=True,
                **{optional: state},
                **constants,
            )
