"""The fused softmax against float64, and no further from it than what eager autocast does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.kernels.softmax import SOFTMAX, softmax, softmax_backward
from tests.compiling import HALF, HIGH, LOW

SHAPES = [(5, 3, 33), (7, 1), (1, 64), (2, 3, 4, 80)]


def unfused(x: Tensor, mask: Tensor | None, scale: float, fill: float | None, keep: bool, dtype: torch.dtype) -> Tensor:
    """As eager autocast does it on a GPU."""
    value = x * scale
    if mask is not None:
        value = value + mask if fill is None else value.masked_fill(~mask if keep else mask, fill)
    exact = x.dtype == torch.float64
    return torch.softmax(value if exact else value.float(), -1).to(torch.float64 if exact else dtype)


def masks(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    yield None, None, False
    yield torch.randn(shape[-2:]).to(dtype), None, False
    yield torch.randn(shape), None, False
    yield torch.rand(shape[-1:]) < 0.3, -torch.inf, False
    yield torch.rand(shape) < 0.8, -1e4, True


@pytest.mark.parametrize("of_x", [LOW, HALF, HIGH])
@pytest.mark.parametrize("dtype", ["low", HIGH])
def test_never_further_from_float64_than_eager_autocast(of_x: torch.dtype, dtype: Any) -> None:
    totals = [0.0, 0.0]
    dtype = (LOW if of_x == HIGH else of_x) if dtype == "low" else dtype
    for shape in SHAPES:
        for mask, fill, keep in masks(shape, of_x):
            x = (4 * torch.randn(shape)).to(of_x).requires_grad_()
            if mask is not None and mask.dtype is torch.bool:
                mask[..., 0] = keep  # a row that is masked whole is NaN
            given = [x] if fill is not None or mask is None else [x, mask.requires_grad_()]
            exact = [t.detach().double().requires_grad_() for t in given]
            wide = exact[1] if len(exact) == 2 else mask
            best = unfused(exact[0], wide, 0.3, fill, keep, HIGH)
            grad = torch.randn(shape).to(dtype)
            best_grads = torch.autograd.grad(best, exact, grad.double())
            low = of_x != HIGH
            low = low, low and mask is not None and mask.dtype == of_x
            ours = softmax(x, mask, 0.3, fill, keep, *low, dtype)[0]
            for i, out in enumerate((ours, unfused(x, mask, 0.3, fill, keep, dtype))):
                assert out.dtype == dtype
                found = torch.autograd.grad(out, given, grad)
                assert [t.dtype for t in found] == [t.dtype for t in given]
                pairs = [(out.detach(), best.detach()), *zip(found, best_grads, strict=True)]
                totals[i] += sum(float((a.double() - b).norm() / (1 + b.norm())) for a, b in pairs)
    assert totals[0] <= 1.01 * totals[1] + 1e-5 and totals[0] < 0.05 * len(SHAPES) * 5 * 3


def test_rows_that_torch_has_no_answer_for() -> None:
    x = torch.randn(6, 9, dtype=LOW)
    x[0], x[1, :5], x[2, 3], x[3, 3], x[4] = -torch.inf, -torch.inf, torch.inf, torch.nan, torch.finfo(LOW).min
    found, *_ = softmax(x, None, 1.0, None, False, False, False, HIGH)
    torch.testing.assert_close(found, torch.softmax(x.float(), -1), equal_nan=True)
    assert found[0].isnan().all() and found[[1, 4, 5]].isfinite().all()
    everything = torch.ones(6, 9, dtype=torch.bool)
    assert softmax(x, everything, 1.0, -torch.inf, False, False, False, HIGH)[0].isnan().all()
    torch.testing.assert_close(
        softmax(x, everything, 1.0, -1e4, False, False, False, HIGH)[0], torch.full((6, 9), 1 / 9)
    )


def test_what_is_replaced_has_no_gradient() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[0] = False
    out, *_ = softmax(x, mask, 2.0, -1e4, False, False, False, HIGH)
    (found,) = torch.autograd.grad(out, x, torch.randn(4, 6))
    assert (found[1:] == 0).all() and (found[0] != 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    out, *_ = softmax(x, None, 1.0, None, False, False, False, LOW)
    assert out.shape == shape and out.dtype == LOW
    assert torch.autograd.grad(out.sum(), x)[0].shape == shape


def test_any_strides() -> None:
    x, mask = torch.randn(6, 5, dtype=LOW).t(), torch.randn(6, 5).t()
    found, *_ = softmax(x, mask, 1.0, None, False, False, False, HIGH)
    torch.testing.assert_close(found, torch.softmax(x.float() + mask, -1))


def test_the_op_is_registered_as_torch_wants_it() -> None:
    x, mask = torch.randn(2, 3, 8, dtype=LOW, requires_grad=True), torch.randn(3, 1)
    torch.library.opcheck(SOFTMAX, (x, mask, 0.5, None, False, True, False, HIGH))
    rows = torch.rand(2, 6) + 1
    given = torch.randn(2, 3, 8), x.detach(), mask, *rows, 0.5, None, False, True, False
    torch.library.opcheck(softmax_backward, given)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 33, 768, 8192, 20000])
def test_on_a_gpu_it_is_what_the_reference_is(width: int) -> None:
    for mask, fill, keep in masks((2, 3, 5, width), LOW):
        kinds = 0.3, fill, keep, True, mask is not None and mask.dtype == LOW, LOW
        x, grad = torch.randn(2, 3, 5, width).to(LOW), torch.randn(2, 3, 5, width).to(LOW)
        results = []
        for device in ("cpu", "cuda"):
            leaf = x.to(device).requires_grad_()
            out, *_ = softmax(leaf, None if mask is None else mask.to(device), *kinds)
            results.append([out.cpu(), torch.autograd.grad(out, leaf, grad.to(device))[0].cpu()])
        for ours, theirs in zip(*reversed(results), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-3, equal_nan=True)
