"""The fused group norm against float64, and no further from it than what eager autocast does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels.group_norm import GROUP_NORM, group_norm, group_norm_backward
from tests.compiling import HALF, HIGH, LOW, error

SHAPES = [(5, 6, 3, 7), (3, 20), (1, 30, 1), (2, 6, 2, 3, 4)]
TYPES = [(LOW, None), (HALF, None), (LOW, LOW), (HALF, HIGH), (HIGH, LOW), (HIGH, HIGH)]
GROUPS = 2


def unfused(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, silu: bool, low: torch.dtype) -> list[Tensor]:
    """As eager autocast does it on a GPU: the sum, the float32 result, and two casts of it."""
    h = x if residual is None else x + residual
    out = F.group_norm(h if h.dtype == torch.float64 else h.float(), GROUPS, weight, bias)
    out = F.silu(out) if silu else out
    return [h, out, *(out if h.dtype == torch.float64 else out.to(low) for _ in range(2))]


def operands(shape: tuple[int, ...], of_x: torch.dtype, of_residual: torch.dtype | None) -> list[Tensor | None]:
    x = (torch.randn(shape) + 1).to(of_x).requires_grad_()
    residual = None if of_residual is None else torch.randn(shape).to(of_residual).requires_grad_()
    return [x, residual, *(torch.randn(shape[1]).requires_grad_() for _ in range(2))]


def fused(operands: list[Tensor | None], silu: bool, low: torch.dtype) -> list[Tensor]:
    """The same four results."""
    x, residual, *_ = operands
    found = group_norm(*operands, GROUPS, 1e-5, silu, False, True, low, 2)[2:]
    return found if residual is not None else [x, *found]


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("of_x", "of_residual"), TYPES)
def test_never_further_from_float64_than_eager_autocast(silu: bool, of_x: Any, of_residual: Any) -> None:
    totals = [0.0, 0.0]
    low = HALF if HALF in (of_x, of_residual) else LOW
    for shape in SHAPES:
        given = operands(shape, of_x, of_residual)
        exact = [None if t is None else t.detach().double().requires_grad_() for t in given]
        wanted = [t for t in given if t is not None]
        reference = unfused(*exact, silu, low)
        grads = [torch.randn(shape).to(t.dtype) for t in unfused(*given, silu, low)]
        exact_grads = torch.autograd.grad(reference, [t for t in exact if t is not None], [g.double() for g in grads])
        for i, results in enumerate((fused(given, silu, low), unfused(*given, silu, low))):
            assert [t.dtype for t in results] == [t.dtype for t in grads]
            found = torch.autograd.grad(results, wanted, grads)
            assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in wanted]
            totals[i] += error(results, reference) + error(found, exact_grads)
    assert totals[0] <= 1.01 * totals[1] + 1e-5 and totals[0] < 0.2


def test_the_value_is_rounded_before_silu_where_the_graph_rounds_it() -> None:
    x, weight, bias = torch.randn(3, 6, 50, dtype=LOW, requires_grad=True), torch.randn(6), torch.randn(6)
    plain = F.group_norm(x.float(), GROUPS, weight, bias)
    rounded = plain.to(LOW)
    _, _, low = group_norm(x, None, weight, bias, GROUPS, 1e-5, True, True, False, LOW, 1)
    unequal = [(low != F.silu(other).to(LOW)).float().mean() for other in (rounded, plain)]
    assert unequal[0] < 0.01 < 0.05 < unequal[1]  # float32 sums of another order may round to the other side
    grad = torch.randn_like(low)
    ours, theirs = (torch.autograd.grad(out, x, grad)[0] for out in (low, F.silu(rounded)))
    assert error([ours], [theirs.double()]) < 2**-7


def test_gradients_meet_in_float32() -> None:
    x = torch.randn(4, 6, 5, dtype=LOW, requires_grad=True)
    grad = torch.randn(4, 6, 5, dtype=LOW)
    copies = group_norm(x, None, None, None, GROUPS, 1e-5, True, False, False, LOW, 7)[2:]
    assert len({t.data_ptr() for t in copies}) == 7
    small = grad * 2**-8  # each is lost when added to `grad` in 16 bits
    (found,) = torch.autograd.grad(copies, x, [grad, *[small] * 6])
    (*_, same) = group_norm(x, None, None, None, GROUPS, 1e-5, True, False, True, LOW, 0)
    (expected,) = torch.autograd.grad(same, x, grad.float() + 6 * small.float())
    assert torch.equal(found, expected)


def test_only_what_is_wanted_has_a_gradient() -> None:
    x, residual, weight, bias = operands((3, 8, 2), LOW, HIGH)
    _, _, h, low = group_norm(x, residual, weight.detach(), None, GROUPS, 1e-5, True, False, False, LOW, 1)
    grad_h = torch.randn(3, 8, 2)
    to_x, to_residual = torch.autograd.grad(h, (x, residual), grad_h, retain_graph=True)
    assert torch.equal(to_residual, grad_h) and torch.equal(to_x, grad_h.to(LOW))
    (to_x,) = torch.autograd.grad(low, x, torch.randn(3, 8, 2, dtype=LOW))
    assert to_x.dtype == LOW and bias.grad is None


def test_no_samples() -> None:
    shape = 0, 8, 3
    given = operands(shape, LOW, HIGH)
    results = fused(given, True, LOW)
    assert [t.shape for t in results] == [torch.Size(shape)] * 4
    found = torch.autograd.grad(results, given, [torch.randn_like(t) for t in results])
    assert all((t == 0).all() for t in found[2:])


def test_groups_that_are_not_finite_give_what_torch_gives() -> None:
    x = torch.randn(4, 4, 9, dtype=LOW)
    x[0, 2, 1], x[1, 3, 0], x[2] = torch.inf, torch.nan, 0.0
    (*_, wide, _) = group_norm(x, None, None, None, GROUPS, 1e-5, True, False, True, LOW, 1)
    torch.testing.assert_close(wide, F.silu(F.group_norm(x.float(), GROUPS)), equal_nan=True)
    assert wide[0, 2:].isnan().all() and wide[0, :2].isfinite().all()


def test_any_strides() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=LOW).to(memory_format=torch.channels_last)
    (*_, wide) = group_norm(x, None, None, None, GROUPS, 1e-5, False, False, True, LOW, 0)
    torch.testing.assert_close(wide, F.group_norm(x.float(), GROUPS))


@pytest.mark.parametrize("silu", [True, False])
def test_the_op_is_registered_as_torch_wants_it(silu: bool) -> None:
    given = operands((3, 8, 2), LOW, HIGH)
    torch.library.opcheck(GROUP_NORM, (*given, GROUPS, 1e-5, silu, False, True, LOW, 2))
    grads = [torch.randn(3, 8, 2), torch.randn(3, 8, 2, dtype=LOW)]
    plain = [None if t is None else t.detach() for t in given]
    statistics = torch.randn(6), torch.rand(6)
    arguments = grads, None, plain[1], *plain[2:], *statistics, GROUPS, silu, False, True, True, LOW
    torch.library.opcheck(group_norm_backward, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("places", [1, 49, 64, 4096, 10000])
@pytest.mark.parametrize("silu", [True, False])
def test_on_a_gpu_it_is_what_the_reference_is(places: int, silu: bool) -> None:
    given = operands((5, 20, places), HIGH, LOW)
    there = [t.detach().cuda().requires_grad_() for t in given]
    here, over = fused(given, silu, LOW), fused(there, silu, LOW)
    grads = [torch.randn_like(t) for t in here]
    found = torch.autograd.grad(over, there, [grad.cuda() for grad in grads])
    assert error([t.cpu() for t in over], [t.double() for t in here]) < 1e-3
    exact = torch.autograd.grad(here, given, grads)
    assert error([t.cpu() for t in found], [t.double() for t in exact]) < 1e-3
    again = torch.autograd.grad(fused(there, silu, LOW), there, [grad.cuda() for grad in grads])
    assert all(map(torch.equal, found, again)), "the same bits in every run"
