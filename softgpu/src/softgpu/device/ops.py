"""Ops that a GPU has and the CPU has in no such form, in plain torch: products into another type, attention."""

from typing import Any

import torch
from torch import Tensor


def mm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(out_dtype)


def mm_dtype_out(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(a.float() @ b.float())


def addmm_dtype(
    bias: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return (beta * bias.float() + alpha * (a.float() @ b.float())).to(out_dtype)


def addmm_dtype_out(*args: Any, out: Tensor, **how: Any) -> Tensor:
    return out.copy_(addmm_dtype(*args, **how))


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    found = (a.float() @ b.float()) * scale_a * scale_b
    return (found if bias is None else found + bias.float()).to(out_dtype or a.dtype)


def scaled_mm_out(*args: Any, out: Tensor, **how: Any) -> Tensor:
    how = {**how, "out_dtype": torch.float32}
    return out.copy_(scaled_mm(*args[:6], **how))


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    found = (q.float() @ k.float().transpose(-1, -2)) * scale
    if not causal:
        return found
    return found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))


def by_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As flash attention lays out its results: heads inside rows."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    s = scores(q, k, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    sums = s.logsumexp(-1)
    out = by_rows((s - sums[..., None]).exp().to(q.dtype).float() @ v.float(), q.dtype)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device).view(torch.uint64)
    unused = torch.zeros((), dtype=torch.int64, device=q.device).view(torch.uint64)
    return out, sums, None, None, q.shape[2], k.shape[2], seed, unused, torch.empty(0, dtype=q.dtype, device=q.device)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    causal, factor = rest[5], q.shape[-1] ** -0.5 if scale is None else scale
    p, g = (scores(q, k, causal, factor) - sums[..., None]).exp(), grad.float()
    ds = p * (g @ v.float().transpose(-1, -2) - (g * out.float()).sum(-1, keepdim=True)) * factor
    found = ds @ k.float(), ds.transpose(-1, -2) @ q.float(), p.transpose(-1, -2) @ g
    return tuple(by_rows(x, q.dtype) for x in found)


def register() -> torch.library.Library:
    """Register them; they stay as long as what is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "mm.dtype": mm_dtype,
        "mm.dtype_out": mm_dtype_out,
        "addmm.dtype": addmm_dtype,
        "addmm.dtype_out": addmm_dtype_out,
        "_scaled_mm": scaled_mm,
        "_scaled_mm.out": scaled_mm_out,
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
    }.items():
        library.impl(name, function, "CUDA")
    return library
