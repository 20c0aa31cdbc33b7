"""One read of all gradients tells what torch's unscale, isfinite and clip_grad_norm_ tell."""

import math
from copy import deepcopy

import pytest
import torch

from ampcompile.kernels.check_grads import check_grads
from tests.kernels.references import check_grads_reference
from tests.pairs import pairs
from tests.scaler.cases import GRAD_DTYPES, assert_close, assert_equal, odd_tensors

NORMS = [None, 1.0, 1e9, torch.tensor(1.0), torch.tensor(1e9)]


@pytest.mark.parametrize(
    ("dtype", "scale", "multiplier", "max_norm"), pairs(GRAD_DTYPES, [None, 3.0], [None, 0.7], NORMS)
)
def test_it_equals_plain_torch_and_a_float64_run(dtype, scale, multiplier, max_norm, engine):
    plain, workspace = (multiplier or 1.0) / (scale or 1.0), {}
    arguments = [None if x is None else torch.tensor(x) for x in (scale, multiplier)]
    for _ in range(2):  # on a GPU the second finds a counter as the first left it
        grads = [*odd_tensors(dtype, engine.sizes), *(torch.randn(40).to(other) for other in GRAD_DTYPES)]
        before = deepcopy(grads)
        found_inf, factor, norm, _ = check_grads(grads, *arguments, max_norm, workspace)
        assert found_inf.item() == 0
        assert_close([factor, norm], list(check_grads_reference(grads, *arguments, max_norm)[1:3]))
        exact = math.sqrt(sum((g.double() * plain).square().sum().item() for g in grads))
        assert norm.item() == pytest.approx(exact, rel=1e-6)
        shrink = 1 if max_norm is None else min(1, float(max_norm) / exact)
        assert factor.item() == pytest.approx(plain * shrink, rel=2e-6)
        assert_equal(grads, before)


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_anywhere_is_found(dtype, value, engine):
    for size in engine.sizes[1:]:
        for index in {0, size // 2, size - 1}:
            grads = [torch.randn(7).to(dtype), torch.randn(size).to(dtype)]
            grads[1][index] = value
            found_inf, _, norm, _ = check_grads(grads, torch.tensor(2.0**16))
            assert found_inf.item() == 1
            assert not norm.isfinite()
            assert check_grads_reference(grads).found_inf.item() == 1


@pytest.mark.parametrize(
    ("scale", "grad", "bad"),
    [
        (2.0**-24, 3e38, True),  # overflows only when unscaled
        (2.0**-24, 1e30, False),
        (2.0**127, 3e38, False),
        (0.0, 1.0, True),
        (0.0, 0.0, True),
        (1e-45, 0.0, True),  # its inverse is infinite
        (math.inf, 1.0, True),  # would turn every gradient into 0
        (math.nan, 1.0, True),
        (1.0, 3.4e38, False),  # its square fits no float32
    ],
)
def test_unscaled_values_and_the_scale_itself_are_checked(scale, grad, bad, engine):
    grads = [torch.full((5,), grad)]
    for check in (check_grads, check_grads_reference):
        assert check(grads, torch.tensor(scale)).found_inf.item() == bad


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_the_factor_is_that_of_torchs_clip(value, engine):
    grads = [torch.full((3,), 2.0), torch.full((2,), value)]
    param = torch.nn.Parameter(torch.zeros(5))
    param.grad = torch.cat(grads)
    norm = torch.nn.utils.clip_grad_norm_([param], 1.5)
    checked = check_grads(grads, max_norm=1.5)
    assert_close([checked.norm], [norm])
    assert_close([grads[0] * checked.multiplier], [param.grad[:3]])


def test_norm_and_digest_do_not_depend_on_the_threads():
    grads = odd_tensors()
    threads = torch.get_num_threads()
    numbers = set()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        numbers.add((check_grads(grads).norm.item(), check_grads(grads).digest.item()))
    torch.set_num_threads(threads)
    assert len(numbers) == 1


def test_empty_gradients_are_finite_and_have_no_norm(engine):
    found_inf, factor, norm, _ = check_grads([torch.empty(0), torch.empty(3, 0)], torch.tensor(4.0), max_norm=1.0)
    assert (found_inf.item(), factor.item(), norm.item()) == (0, 0.25, 0)


def test_gradients_of_equal_norm_have_other_digests(engine):
    """By signs, by order, by the tensors that have them."""
    grads = [torch.arange(1.0, 6.0), torch.arange(3.0, 8.0)]
    others = [-grad for grad in grads], [grad.flip(0) for grad in grads], grads[::-1], [-grad for grad in grads[::-1]]
    checked = [check_grads(each) for each in (grads, *others)]
    assert len({each.norm.item() for each in checked}) == 1
    assert len({each.digest.item() for each in checked}) == len(checked)
