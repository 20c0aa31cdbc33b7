"""The fused norm against float64, and no further from it than what eager autocast does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels.norm import NORM, norm, norm_backward
from tests.compiling import HALF, HIGH, LOW, error

SHAPES = [(5, 3, 33), (7, 1), (1, 64), (2, 3, 4, 80)]
TYPES = [(LOW, None), (HALF, None), (LOW, LOW), (HALF, HIGH), (HIGH, LOW), (HIGH, HIGH)]


def unfused(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, centered: bool, low: torch.dtype
) -> list[Tensor]:
    """As eager autocast does it on a GPU: the sum, the float32 result, and two casts of it."""
    h = x if residual is None else x + residual
    shape, wide = h.shape[-1:], h if h.dtype == torch.float64 else h.float()
    if centered:
        out = F.layer_norm(wide, shape, weight, bias)
    else:
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        out = out * weight + bias
    return [h, out, *(out if h.dtype == torch.float64 else out.to(low) for _ in range(2))]


def operands(shape: tuple[int, ...], of_x: torch.dtype, of_residual: torch.dtype | None) -> list[Tensor | None]:
    x = (torch.randn(shape) + 1).to(of_x).requires_grad_()
    residual = None if of_residual is None else torch.randn(shape).to(of_residual).requires_grad_()
    return [x, residual, *(torch.randn(shape[-1:]).requires_grad_() for _ in range(2))]


def fused(operands: list[Tensor | None], centered: bool, low: torch.dtype, wide: bool = True) -> list[Tensor]:
    """The same four results."""
    x, residual, *_ = operands
    found = norm(*operands, x.shape[-1], 1e-5, centered, False, wide, low, 2)[1 + centered :]
    return found if residual is not None else [x, *found]


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("of_x", "of_residual"), TYPES)
def test_never_further_from_float64_than_eager_autocast(centered: bool, of_x: Any, of_residual: Any) -> None:
    totals = [0.0, 0.0]
    low = HALF if HALF in (of_x, of_residual) else LOW
    for shape in SHAPES:
        given = operands(shape, of_x, of_residual)
        exact = [None if t is None else t.detach().double().requires_grad_() for t in given]
        wanted = [t for t in given if t is not None]
        reference = unfused(*exact, centered, low)
        grads = [torch.randn(shape).to(t.dtype) for t in unfused(*given, centered, low)]
        exact_grads = torch.autograd.grad(reference, [t for t in exact if t is not None], [g.double() for g in grads])
        for i, results in enumerate((fused(given, centered, low), unfused(*given, centered, low))):
            assert [t.dtype for t in results] == [t.dtype for t in grads]
            found = torch.autograd.grad(results, wanted, grads)
            assert [t.dtype for t in found] == [t.dtype for t in wanted]
            assert [t.shape for t in found] == [t.shape for t in wanted]
            totals[i] += error(results, reference) + error(found, exact_grads)
    assert totals[0] <= 1.01 * totals[1] + 1e-5 and totals[0] < 0.2


def test_the_normed_value_is_rounded_where_the_graph_rounds_it() -> None:
    x, weight = torch.randn(6, 50, dtype=LOW), torch.randn(50)
    rounded = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(LOW)
    _, wide = norm(x, None, weight, None, 50, 1e-6, False, True, True, LOW, 0)
    assert torch.equal(wide, weight * rounded)


def test_gradients_meet_in_float32() -> None:
    x = torch.randn(4, 30, dtype=LOW, requires_grad=True)
    grad = torch.randn(4, 30, dtype=LOW)
    copies = norm(x, None, None, None, 30, 1e-5, False, False, False, LOW, 7)[1:]
    assert len({t.data_ptr() for t in copies}) == 7
    small = grad * 2**-8  # each is lost when added to `grad` in 16 bits
    (found,) = torch.autograd.grad(copies, x, [grad, *[small] * 6])
    (_, *same) = norm(x, None, None, None, 30, 1e-5, False, False, True, LOW, 0)
    (expected,) = torch.autograd.grad(same, x, [grad.float() + 6 * small.float()])
    assert torch.equal(found, expected)


def test_only_what_is_wanted_has_a_gradient() -> None:
    x, residual, weight, bias = operands((3, 8), LOW, HIGH)
    _, h, low = norm(x, residual, weight.detach(), None, 8, 1e-5, False, False, False, LOW, 1)
    assert h.dtype == HIGH
    grad_h = torch.randn(3, 8)
    to_x, to_residual = torch.autograd.grad(h, (x, residual), grad_h, retain_graph=True)
    assert torch.equal(to_residual, grad_h) and torch.equal(to_x, grad_h.to(LOW))
    (to_x,) = torch.autograd.grad(low, x, torch.randn(3, 8, dtype=LOW))
    assert to_x.dtype == LOW and bias.grad is None


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    given = operands(shape, LOW, HIGH)
    results = fused(given, True, LOW)
    assert [t.shape for t in results] == [torch.Size(shape)] * 4
    found = torch.autograd.grad(results, given, [torch.randn_like(t) for t in results])
    assert all((t == 0).all() for t in found[2:])


def test_rows_that_are_not_finite_give_what_torch_gives() -> None:
    x = torch.randn(4, 9, dtype=LOW)
    x[0, 2], x[1, 3], x[2] = torch.inf, torch.nan, 0.0
    _, _, wide, _ = norm(x, None, None, None, 9, 1e-5, True, False, True, LOW, 1)
    torch.testing.assert_close(wide, F.layer_norm(x.float(), (9,)), equal_nan=True)


def test_any_strides() -> None:
    x = torch.randn(6, 5, dtype=LOW).t()
    torch.testing.assert_close(
        norm(x, None, None, None, 6, 1e-5, True, False, True, LOW, 0)[2], F.layer_norm(x.float(), (6,))
    )


@pytest.mark.parametrize("centered", [True, False])
def test_the_op_is_registered_as_torch_wants_it(centered: bool) -> None:
    given = operands((3, 8), LOW, HIGH)
    torch.library.opcheck(NORM, (*given, 8, 1e-5, centered, False, True, LOW, 2))
    mean = torch.randn(3) if centered else None
    grads = [torch.randn(3, 8), torch.randn(3, 8, dtype=LOW)]
    plain = [None if t is None else t.detach() for t in given]
    arguments = grads, None, plain[1], plain[2], mean, torch.rand(3), 8, False, True, True, LOW
    torch.library.opcheck(norm_backward, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 33, 768, 8192, 20000])
@pytest.mark.parametrize("centered", [True, False])
def test_on_a_gpu_it_is_what_the_reference_is(width: int, centered: bool) -> None:
    given = operands((300, width), HIGH, LOW)
    there = [t.detach().cuda().requires_grad_() for t in given]
    here, over = fused(given, centered, LOW), fused(there, centered, LOW)
    grads = [torch.randn_like(t) for t in here]
    found = torch.autograd.grad(over, there, [grad.cuda() for grad in grads])
    assert error([t.cpu() for t in over], [t.double() for t in here]) < 1e-3
    exact = torch.autograd.grad(here, given, grads)
    assert error([t.cpu() for t in found], [t.double() for t in exact]) < 1e-3
    again = torch.autograd.grad(fused(there, centered, LOW), there, [grad.cuda() for grad in grads])
    assert all(map(torch.equal, found, again)), "the same bits in every run"
