"""Operands of mixed floating dtypes are promoted, and gradients reach every one of them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = torch.tensor([0, 2])
MASK = torch.tensor([[True, False, True, True]]).expand(4, 4)
INDEX = torch.tensor([[0, 1, 2, 3]]).expand(4, 4)
MATRIX = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def assigned(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:2] = b[:2]
    a[ROWS] = b[2:]
    return a


def copied(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:2].copy_(b[:2])
    return a


OPS = {
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(MASK, a, b),
    "lerp with a number": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp with a tensor": lambda a, b: torch.lerp(a, b, a),
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b.abs() + 1),
    "index_put": lambda a, b: torch.index_put(a, (ROWS,), b[:2]),
    "index_add": lambda a, b: a.index_add(0, ROWS, b[:2]),
    "index_add_": lambda a, b: a.clone().index_add_(0, ROWS, b[:2]),
    "index_copy": lambda a, b: a.index_copy(0, ROWS, b[:2]),
    "scatter": lambda a, b: a.scatter(1, INDEX, b),
    "scatter_add": lambda a, b: a.scatter_add(0, INDEX, b),
    "scatter_reduce": lambda a, b: a.scatter_reduce(0, INDEX, b, "sum"),
    "masked_scatter": lambda a, b: a.masked_scatter(MASK, b),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "addmv": lambda a, b: torch.addmv(a[0], b, a[1]),
    "cross": lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4)),
    "convolution": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "setitem": assigned,
    "copy_": copied,
}


@pytest.mark.parametrize("order", ["low first", "float32 first", "both float32"])
@pytest.mark.parametrize("op", OPS)
def test_gradients_arrive(op: str, order: str) -> None:
    a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def f(a: Tensor, b: Tensor) -> Tensor:
        if order == "both float32":
            return OPS[op](a * 1, b * 1)
        return OPS[op](a @ MATRIX, b) if order == "low first" else OPS[op](a, b @ MATRIX)

    out = torch.compile(f, backend="amp", options={"lower": "aot_eager"})(a, b)
    grad = torch.randn_like(out)
    exact = f(a, b)
    ours = torch.autograd.grad(out, (a, b), grad)
    theirs = torch.autograd.grad(exact, (a, b), grad.to(exact.dtype))
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.1)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() <= 0.05 * other.norm() + 0.01
