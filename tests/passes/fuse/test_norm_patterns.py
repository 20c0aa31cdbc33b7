"""Which chains of ops are norms."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.passes.fuse.norm_patterns import Norm, norms
from tests.passes.captured import captured, settled

X, V = torch.ones(3, 4, 8), torch.ones(8)


def spelled(f: object, x: Tensor = X) -> list[Norm]:
    return list(norms(settled(captured(f, x, V, dtype=None)).graph))  # type: ignore[arg-type]


def test_torchs_own_ops() -> None:
    (norm,) = spelled(lambda x, v: F.layer_norm(x, (4, 8)))
    assert (norm.width, norm.eps, norm.centered, norm.weight, norm.bias) == (32, 1e-5, True, None, None)
    (norm,) = spelled(lambda x, v: F.layer_norm(x, (8,), bias=v, eps=1e-3))
    assert (norm.width, norm.eps, norm.weight) == (8, 1e-3, None) and norm.bias is not None
    (norm,) = spelled(lambda x, v: F.rms_norm(x, (8,), v))
    assert (norm.eps, norm.centered, norm.bias) == (torch.finfo(torch.float32).eps, False, None)
    assert norm.weight is not None
    assert spelled(lambda x, v: F.rms_norm(x, (8,)), X.bfloat16()) == []  # another eps on another release


def squared(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, v: v * (x * torch.rsqrt(squared(x) + 1e-6)),
        lambda x, v: (torch.rsqrt(1e-6 + x.square().mean(2, True)) * x) * v,
        lambda x, v: v * (x.float() * torch.rsqrt((x * x).mean([-1], keepdim=True).add(1e-6))).type_as(x),
        lambda x, v: (x * torch.rsqrt(squared(x.float()) + 1e-6)) * (v + 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand(f: object, dtype: torch.dtype) -> None:
    found = spelled(f, X.to(dtype))
    if dtype is torch.bfloat16 and not found:
        return  # 16-bit squares
    (norm,) = found
    assert (norm.width, norm.eps, norm.centered) == (8, 1e-6, False)
    assert norm.operand.meta["val"].dtype is dtype and norm.weight is not None
    assert norm.node.target is torch.ops.aten.mul.Tensor and norm.node.meta["val"].shape == X.shape


def test_rounded_before_the_weight() -> None:
    def f(x: Tensor, v: Tensor) -> Tensor:
        wide = x.float()
        return v * (wide * torch.rsqrt(squared(wide) + 1e-6)).to(x.dtype)

    assert [norm.inner for norm in spelled(f, X.bfloat16())] == [True]
    assert [norm.inner for norm in spelled(f)] == [False]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, v: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6),
        lambda x, v: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)[..., None],
        lambda x, v: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
        lambda x, v: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
        lambda x, v: x * torch.rsqrt(squared(x) + v[:1]),
        lambda x, v: x * torch.rsqrt(torch.add(squared(x), 1e-6, alpha=2)),
        lambda x, v: (x + 1) * torch.rsqrt(squared(x) + 1e-6),
        lambda x, v: v * torch.rsqrt(squared(x) + 1e-6),
        lambda x, v: (y := torch.rsqrt(squared(x) + 1e-6)) * x + y,
        lambda x, v: (x * v) * torch.rsqrt((x * (x * v)).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_what_is_no_norm(f: object) -> None:
    assert spelled(f) == []


def test_a_factor_that_is_no_weight_stays_outside() -> None:
    (norm,) = spelled(lambda x, v: x * (x * torch.rsqrt(squared(x) + 1e-6)))
    assert norm.weight is None and len(norm.node.users) == 1
