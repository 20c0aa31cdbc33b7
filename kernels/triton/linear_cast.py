"""Multiply by a float32 matrix that is rounded in registers; see `ampcompile.kernels.linear_cast`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton


class Tile(NamedTuple):
    """The tile of one program, rows of x by features, with the depth of one step."""

    rows: int
    features: int
    depth: int
    warps: int
    stages: int


FEW = Tile(16, 32, 128, 4, 4)
"""For products bound by memory: narrow, so that many programs stream the weight, each with 60 KiB in flight."""
MANY = Tile(128, 128, 32, 8, 4)
STRIP = 8
"""Row tiles of neighbouring programs, few enough that the operands they share stay in the L2 cache."""


@triton.jit(do_not_specialize=["rows"])
def amp_linear_cast(
    x,
    weight,
    bias,
    out,
    rows,
    features,
    depth,
    x_row,
    x_depth,
    weight_feature,
    weight_depth,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Compute a transposed tile of `out`: the weight, as first operand, goes from registers to the tensor cores."""
    LOW: tl.constexpr = out.dtype.element_ty
    number = tl.program_id(0)
    row_tiles, feature_tiles = tl.cdiv(rows, ROWS), tl.cdiv(features, FEATURES)
    i, j = tl.swizzle2d(number // feature_tiles, number % feature_tiles, row_tiles, feature_tiles, STRIP)
    row = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = j.to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, DEPTH)
    weight_at = weight + feature[:, None] * weight_feature + k[None, :] * weight_depth
    x_at = x + row[None, :] * x_row + k[:, None] * x_depth
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for begin in range(0, depth, DEPTH):
        remaining = depth - begin
        w = tl.load(weight_at, mask=(feature < features)[:, None] & (k < remaining)[None, :], other=0.0)
        values = tl.load(x_at, mask=(row < rows)[None, :] & (k < remaining)[:, None], other=0.0)
        total = tl.dot(w.to(LOW), values, total)
        weight_at += DEPTH * weight_depth
        x_at += DEPTH * x_depth
    if HAS_BIAS:
        shift = tl.load(bias + feature, mask=feature < features, other=0.0).to(LOW)
        total += shift.to(tl.float32)[:, None]
    valid = (row < rows)[None, :] & (feature < features)[:, None]
    tl.store(out + row[None, :] * features + feature[:, None], total.to(LOW), mask=valid)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` (rows, depth) @ `weight` (features, depth) transposed + `bias`: one launch, whatever the strides."""
    (rows, depth), features = x.shape, weight.shape[0]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    tile = FEW if isinstance(rows, int) and rows <= FEW.rows else MANY  # comparing a symbol would add a guard
    wrap_triton(amp_linear_cast)[(triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.features),)](
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        rows,
        features,
        depth,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        FEATURES=tile.features,
        DEPTH=tile.depth,
        STRIP=STRIP,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
