"""The backward of group norm; see `ampcompile.kernels.group_norm`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .group_norm import row_of, scaled
from .norm_backward import GRADS, at_most_four, incoming, normed, pass_on


@triton.jit
def through_silu(grad, value, weight, bias, channel, exists, TO: tl.constexpr, HAS_WEIGHT: tl.constexpr,
                 HAS_BIAS: tl.constexpr, SILU: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """The gradient of what SiLU got."""
    if SILU:
        out = scaled(value, weight, bias, channel, exists, TO, HAS_WEIGHT, HAS_BIAS, INNER)
        share = tl.sigmoid(out)
        grad *= share * (1.0 + out * (1.0 - share))
    return grad


@triton.jit(do_not_specialize=["groups", "per_group"])
def amp_group_norm_backward(
    g0, g1, g2, g3, grad_sum, h, weight, bias, means, rstds, first, second, to_weight, to_bias,
    groups, per_group, places,
    COUNT: tl.constexpr, HAS_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    INNER: tl.constexpr, HAS_SECOND: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row a program: sums over each channel's places, which give the row's, then the gradient."""
    TO: tl.constexpr = h.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    start = row * per_group * places
    h, grad_sum, first, second = h + start, grad_sum + start, first + start, second + start
    g0, g1, g2, g3 = g0 + start, g1 + start, g2 + start, g3 + start
    one = tl.arange(0, 1)
    mean = tl.load(means + row + one)
    rstd = tl.load(rstds + row + one)
    first_mean = tl.zeros([1], tl.float32)
    second_mean = tl.zeros([1], tl.float32)
    for block in range(0, per_group, CHANNELS):
        channel = block + tl.arange(0, CHANNELS)
        exists = channel < per_group
        vector = row % groups * per_group + channel
        plain = tl.zeros([CHANNELS, PLACES], tl.float32)
        weighted = tl.zeros([CHANNELS, PLACES], tl.float32)
        for begin in range(0, places, PLACES):
            place = begin + tl.arange(0, PLACES)
            there = exists[:, None] & (place < places)[None, :]
            at = channel[:, None] * places + place[None, :]
            grad = incoming(g0, g1, g2, g3, at, there, COUNT)
            value = normed(h, mean, rstd, at, there)
            grad = through_silu(grad, value, weight, bias, vector, exists, TO, HAS_WEIGHT, HAS_BIAS, SILU, INNER)
            plain += grad
            weighted += grad * value
        by_bias = tl.sum(plain, 1)
        by_weight = tl.sum(weighted, 1)
        if TO_BIAS:
            tl.store(to_bias + row * per_group + channel, by_bias, mask=exists)
        if TO_WEIGHT:
            tl.store(to_weight + row * per_group + channel, by_weight, mask=exists)
        if HAS_WEIGHT:
            scale = tl.load(weight + vector, mask=exists, other=0.0).to(tl.float32)
            by_bias *= scale
            by_weight *= scale
        first_mean += tl.sum(by_bias, 0)
        second_mean += tl.sum(by_weight, 0)
    first_mean /= per_group * places
    second_mean /= per_group * places
    for block in range(0, per_group, CHANNELS):
        channel = block + tl.arange(0, CHANNELS)
        exists = channel < per_group
        vector = row % groups * per_group + channel
        for begin in range(0, places, PLACES):
            place = begin + tl.arange(0, PLACES)
            there = exists[:, None] & (place < places)[None, :]
            at = channel[:, None] * places + place[None, :]
            grad = incoming(g0, g1, g2, g3, at, there, COUNT)
            value = normed(h, mean, rstd, at, there)
            grad = through_silu(grad, value, weight, bias, vector, exists, TO, HAS_WEIGHT, HAS_BIAS, SILU, INNER)
            if HAS_WEIGHT:
                grad *= tl.load(weight + vector, mask=exists, other=0.0).to(tl.float32)[:, None]
            pass_on(grad, value, first_mean, second_mean, rstd, grad_sum, first, second, at, there, HAS_SUM, HAS_SECOND)


def backward(
    grads: Sequence[Tensor],
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    inner: bool,
    to_weight: bool,
    to_bias: bool,
    second: torch.dtype | None,
) -> list[Tensor]:
    """See `ampcompile.kernels.group_norm.group_norm_backward`; all operands but `grads` are contiguous."""
    row = row_of(h, groups)
    first = torch.empty_like(h)
    other = None if second is None else torch.empty_like(h, dtype=second)
    # A row a sample: each is written by one program, and they are summed in one order.
    sums = [
        torch.empty(h.shape[:2], dtype=torch.float32, device=h.device) if wanted else None
        for wanted in (to_weight, to_bias)
    ]
    wrap_triton(amp_group_norm_backward)[(h.shape[0] * groups,)](
        *at_most_four(grads, h.shape),
        h if grad_sum is None else grad_sum,
        h,
        h if weight is None else weight,
        h if bias is None else bias,
        mean,
        rstd,
        first,
        first if other is None else other,
        *(rstd if each is None else each for each in sums),
        groups,
        row.per_group,
        row.places,
        COUNT=min(len(grads), GRADS),
        HAS_SUM=grad_sum is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        SILU=silu,
        INNER=inner,
        HAS_SECOND=other is not None,
        TO_WEIGHT=to_weight,
        TO_BIAS=to_bias,
        CHANNELS=row.channels_tile,
        PLACES=row.places_tile,
        num_warps=row.warps,
    )
    return [first, *([] if other is None else [other]), *(each.sum(0) for each in sums if each is not None)]
