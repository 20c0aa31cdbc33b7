"""The 16-bit copies of weights that an optimizer's kernel writes, and which tensors one launch can take together."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
NO_COPY = torch.float32


@triton.jit
def refresh(copy, offset, weight, mask, COPY: tl.constexpr):
    """Round weights into their copy; a copy at address 0 isn't there, a COPY of float32 is nowhere."""
    if COPY.primitive_bitwidth == 32:
        return
    if copy.to(tl.int64) != 0:
        tl.store(copy + offset, weight.to(COPY), mask=mask)


def launches(
    grads: Sequence[Tensor], copies: Sequence[Tensor | None], states: Sequence[Tensor | None]
) -> list[tuple[torch.dtype, torch.dtype, bool, np.ndarray]]:
    """Tensors whose types suit one launch: type of gradients and copies, whether there is a state, which tensors.

    A tensor without a copy goes with those that have one.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    usual = next((copy.dtype for copy in copies if copy is not None), NO_COPY)
    for i, (grad, copy, state) in enumerate(zip(grads, copies, states, strict=True)):
        key = (grad.dtype, usual if copy is None else copy.dtype, state is not None)
        kinds.setdefault(key, []).append(i)
    return [(*kind, np.array(chosen)) for kind, chosen in kinds.items()]
