"""The backward of short attention on the CPU, with float32 between its products.

torch's flash kernel multiplies one head's tile after the other; at 128 tokens the calls cost more than the products.
Written as whole products over all heads, compiled by Inductor, it takes half the time, and its gradients are closer to
float64: the probabilities and their gradients are not rounded to 16 bits. Forward stays torch's kernel, bit for bit.

Flops: 10·B·H·L·S·D, as the flash kernel's. Bytes: 4·B·H·L·S for each of three matrices more, which is why it is for
short sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LONGEST = 128
"""Tokens up to which this was faster than the flash kernel, with 64 features a head, on a CPU with AVX-512."""


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Gradients of `query` (B, H, L, D), `key` and `value` (B, H, S, D), in their 16-bit dtype; as `FLASH_BACKWARD`.

    `out` is forward's result, `logsumexp` (B, H, L) is float32. NotImplemented where the flash kernel is to run.
    """
    if attn_mask is not None or dropout_p != 0 or not _short(query, key) or query.itemsize != 2:
        return NotImplemented
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v, grad = query.float(), key.float(), value.float(), grad_out.float()
    probabilities = (q @ k.mT * scale - logsumexp[..., None]).exp()
    if is_causal:
        probabilities = probabilities.tril()
    mean = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad @ v.mT - mean) * scale
    results = grad_scores @ k, grad_scores.mT @ q, probabilities.mT @ grad
    return tuple(result.to(query.dtype) for result in results)


def _short(query: Tensor, key: Tensor) -> bool:
    lengths = query.shape[-2], key.shape[-2]
    known = all(isinstance(length, int) for length in lengths)  # a symbol would have to be guarded
    return known and max(lengths) <= LONGEST and query.shape[:-2] == key.shape[:-2]
