"""Backward of attention on the CPU, where torch's flash kernel is slow.

torch multiplies one head's tile after the other, and with some hundred tokens the calls cost more than the products. On
processors with AVX512-BF16 a kernel of ours (`cpp/attention.h`) does the same arithmetic in an eighth of the time with
128 tokens: scores and their gradients are float32, rounded to 16 bits only as operands. Elsewhere Inductor compiles
short attention as whole products over all heads, in float32: half the flash kernel's time. In both cases gradients are
on average no further from float64 than the flash kernel's. Forward stays torch's kernel, bit for bit.

Flops: 10·B·H·L·S·D, as the flash kernel's. Whole products move 4·B·H·L·S bytes more for each of three matrices, so
they are for short sequences.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.torch_private import processor

from . import native, tables

FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LONGEST = 128
"""Tokens up to which whole products were faster than the flash kernel, with 64 features a head, with AVX-512."""

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "Tensor? attn_mask, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)"
)
ATTENTION_BACKWARD = torch.ops.ampcompile.attention_backward.default


def available() -> bool:
    """True if our kernel supports this processor: AVX512-BF16, without AMX, where torch's kernel wasn't measured."""
    return processor.multiplies(torch.bfloat16) and _is_built()


@functools.cache
def _is_built() -> bool:
    library = native.library()
    return library is not None and bool(library.attention_available())


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

    `out` is forward's result, `logsumexp` (B, H, L) is float32; `attn_mask`, if given, is added to the scores, and
    broadcast to (B, H, L, S). Returns NotImplemented if the flash kernel is to run.
    """
    batch, heads, queries, features = query.shape
    if dropout_p != 0 or query.itemsize != 2 or not isinstance(features, int):  # a symbol would be guarded
        return NotImplemented
    if key.shape[:2] != (batch, heads) or value.shape != key.shape or features == 0:
        return NotImplemented
    scale = 1 / math.sqrt(features) if scale is None else scale
    arguments = grad_out, query, key, value, out, logsumexp
    if query.dtype == torch.bfloat16 and features % 16 == 0 and available():
        return ATTENTION_BACKWARD(*arguments, attn_mask, is_causal, scale)
    lengths = queries, key.shape[2]
    if attn_mask is not None or not all(isinstance(n, int) and n <= LONGEST for n in lengths):
        return NotImplemented
    return attention_backward_reference(*arguments, is_causal, scale)


def attention_backward_reference(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """`attention_backward` as whole products, in float32 until the end."""
    q, k, v, grad = query.float(), key.float(), value.float(), grad_out.float()
    probabilities = (q @ k.mT * scale - logsumexp[..., None]).exp()
    if is_causal:
        probabilities = probabilities.tril()
    mean = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad @ v.mT - mean) * scale
    results = grad_scores @ k, grad_scores.mT @ q, probabilities.mT @ grad
    return tuple(result.to(query.dtype) for result in results)


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Empty results in the tensors' layouts, or contiguous where a tensor's features don't lie side by side."""
    results = map(torch.empty_like, tensors)
    return tuple(t if t.stride(-1) == 1 else t.new_empty(t.shape) for t in results)


@torch.library.register_fake(ATTENTION_BACKWARD, lib=_LIBRARY)
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return _empty_like(query, key, value)


@torch.library.impl(_LIBRARY, "attention_backward", "CPU")
def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale = arguments
    results = _empty_like(query, key, value)
    if not available():  # compiled on another machine
        gradients = FLASH_BACKWARD(*arguments[:6], 0.0, is_causal, attn_mask=attn_mask, scale=scale)
        for result, gradient in zip(results, gradients, strict=True):
            result.copy_(gradient)
        return results
    operands = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value, grad_out, out)]
    (batch, heads, queries, features), keys = query.shape, key.shape[2]
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, queries, keys)
    tensors = [*operands, *results, logsumexp.unsqueeze(-1), mask]
    native.call(
        "attention_backward",
        batch * heads,
        np.array([heads, queries, keys, features, is_causal], dtype=np.int64),
        tables.addresses(tensors),
        np.array([(0, 0, 0, 0) if t is None else t.stride() for t in tensors], dtype=np.int64),
        native.dtype_codes([mask]),
        np.array(scale, dtype=np.float32),
    )
    return results
