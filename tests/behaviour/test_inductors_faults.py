"""Programs that Inductor gets wrong by half: arguments that its patterns forget, and writes that it reorders."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiling import LOW, amp

Program = Callable[..., list[Tensor]]


def sums(x: Tensor, w: Tensor, b: Tensor, u: Tensor) -> list[Tensor]:
    """Sums and differences of products with `alpha`."""
    return [
        torch.add(x @ w, x @ w.t(), alpha=0.3),
        F.linear(x, w).add(F.linear(x, w.t()), alpha=2.0),
        torch.add(x, x @ w, alpha=0.3),
        torch.sub(x @ w, x, alpha=0.3),
        torch.add(x @ w, b, alpha=3.0),
        torch.sub(b, F.linear(x, w, b), alpha=3.0),
        torch.rsub(x @ w, u @ w, alpha=-0.7),
        (x @ w).add_(u, alpha=-0.5),
        (torch.add(x @ w, u @ w, alpha=1.1) @ w).relu(),
        torch.add((x @ w).relu(), u, alpha=2),
    ]


def products(x: Tensor, w: Tensor, b: Tensor, u: Tensor) -> list[Tensor]:
    """Products that add, with `alpha` and `beta`; what `beta=0` multiplies isn't read."""
    nan = torch.full_like(u, torch.nan)
    batch, batches = x.view(2, 4, 16), w.expand(2, 16, 16)
    return [
        torch.addmm(u, x, w, alpha=0.3, beta=-2),
        torch.addmm(b, x @ w, w, beta=0.5).relu(),
        torch.addmm(u @ w, x, w, alpha=2.0) + x @ w,
        torch.baddbmm(batch, batch, batches, alpha=-0.7, beta=0.1),
        torch.addbmm(u[:4], batch, batches, alpha=0.3, beta=0.5),
        torch.addmv(u[:, 0], x, b, alpha=0.3, beta=2),
        torch.addr(u, x[:, 0], b, alpha=0.3, beta=-1),
        torch.addmm(nan, x, w, beta=0, alpha=2),
        torch.baddbmm(nan.view(2, 4, 16), batch, batches, beta=0),
        torch.addmv(nan[:, 0], x, b, beta=0),
    ]


def writes(x: Tensor, w: Tensor, b: Tensor, u: Tensor) -> list[Tensor]:
    """Writes through views and indices between products."""
    y = x @ w
    y.fill_diagonal_(0.0)
    y[y > 1] = 5.0
    z = x * 1.5
    z[1:5].mul_(2.0)
    z.diagonal().copy_(z.diagonal().flip(0))
    v = (x @ w).relu()
    v.t()[2:6] = 0.25
    v.masked_fill_(v > 0.5, -1.0)
    v[:, 1::3].add_(1.0)
    return [y @ w, y, z * 2, v @ w]


@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # of Inductor's own lowering
@pytest.mark.parametrize(
    "products_by", ["auto", *(pytest.param(way, marks=pytest.mark.ci) for way in ("torch", "float32"))]
)
@pytest.mark.parametrize("programs", [sums, products, writes])
def test_they_are_as_near_to_float64_as_eager_autocasts(programs: Program, products_by: str) -> None:
    x, w, b, u = torch.randn(8, 16), torch.randn(16, 16) / 4, torch.randn(16), torch.randn(8, 16)
    with torch.no_grad():
        exact = programs(*(each.double() for each in (x, w, b, u)))
        with torch.autocast("cpu", LOW):
            eagers = programs(x, w, b, u)
        ours = amp(programs, lower="inductor", products=products_by)[0](x, w, b, u)
    for i, (mine, eager, truth) in enumerate(zip(ours, eagers, exact, strict=True)):
        errors = [((each.double() - truth).norm() / truth.norm()).item() for each in (mine, eager)]
        assert errors[0] <= 3 * errors[1] + 1e-6, (i, errors)
