"""Loss scaling: gradients are checked in one read, multiplied in place, and the scale moves as torch's does.

Checks tell what torch's unscale, isfinite and clip_grad_norm_ tell; the bits of the rest are torch's.
"""

import math
import random
from copy import deepcopy

import pytest
import torch

from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.unscale import unscale_
from ampcompile.kernels.update_scale import update_scale_
from tests.kernels.references import check_grads_reference, unscale_reference_
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


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("multiplier", [2.0**-16, 1 / 3, 1.0, 0.0, 7.5])
def test_same_bits_as_torchs_kernel(dtype, multiplier, engine):
    grads = odd_tensors(dtype, engine.sizes)
    torchs, references = deepcopy(grads), deepcopy(grads)
    flags = [torch.zeros(()) for _ in range(3)]
    unscale_(grads, torch.tensor(multiplier), flags[0])
    unscale_reference_(references, torch.tensor(multiplier), flags[1])
    torch._amp_foreach_non_finite_check_and_unscale_(torchs, flags[2], torch.tensor(multiplier))
    assert_equal(grads, torchs)
    assert_equal(references, torchs)
    assert [flag.item() for flag in flags] == [multiplier == 0, multiplier == 0, 0]


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("multiplier", [0.5, 1.0])
def test_unscaling_finds_one_bad_element_anywhere(dtype, value, multiplier, engine):
    for size in engine.sizes[1:]:
        for index in {0, size // 2, size - 1}:
            grads = [torch.randn(7).to(dtype), torch.randn(size).to(dtype)]
            grads[1][index] = value
            found_inf = torch.zeros(1)
            unscale_(grads, torch.tensor(multiplier), found_inf)
            assert found_inf.item() == 1


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e38), (torch.float16, 60000.0), (torch.bfloat16, 3e38)])
def test_an_overflow_by_the_product_is_found(dtype, value, engine):
    for kernel in (unscale_, unscale_reference_):
        found_inf = torch.zeros(())
        kernel([torch.tensor([1.0, value], dtype=dtype)], torch.tensor(2.0), found_inf)
        assert found_inf.item() == 1


def test_a_multiplier_of_one_keeps_the_payload_of_nan(engine):
    grad = torch.tensor([0x7FA00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    unscale_([grad], torch.tensor([1.0]), torch.zeros(()))
    assert grad.view(torch.int32).tolist() == [0x7FA00001, 0x3F800000]


def test_the_flag_is_never_cleared(engine):
    for kernel in (unscale_, unscale_reference_):
        found_inf = torch.ones(())
        kernel([torch.ones(3)], torch.tensor(0.5), found_inf)
        assert found_inf.item() == 1


def updated(scale, tracker, found_infs, growth=2.0, backoff=0.5, interval=3, low=0.0, high=math.inf, skips=0):
    tensors = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(skips, dtype=torch.int32)
    update_scale_(*tensors, [torch.tensor(f) for f in found_infs], growth, backoff, interval, low, high)
    return [tensor.item() for tensor in tensors]


def test_random_updates_equal_torchs_bit_for_bit(engine):
    for _ in range(100 if engine.capability else 500):
        scale = random.choice([random.uniform(0, 1e5), 2.0 ** random.randint(-140, 127), 1e38, 0.0, math.inf, math.nan])
        tracker, interval = random.randint(-2, 4), random.randint(0, 4)
        growth, backoff = random.choice([2.0, 1.1, 1.0001, 1e30]), random.choice([0.5, 0.7, 1e-30, 0.0])
        founds = random.choices([0.0, 0.0, 1.0, 2.0, -1.0, math.nan], k=random.randint(1, 2))
        bounds = random.choice([(0.0, math.inf), (2.0**-24, 2.0**64)])
        expected = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        overflow = any(found != 0 for found in founds)
        torch._amp_update_scale_(*expected, torch.tensor(float(overflow)), growth, backoff, interval)
        expected[0].clamp_(*bounds)
        got = updated(scale, tracker, founds, growth, backoff, interval, *bounds)
        assert str(got) == str([*(tensor.item() for tensor in expected), int(overflow)])  # NaN too


@pytest.mark.parametrize("found_infs", [[0.0, 1.0], [1.0, 1.0], [1.0, -1.0], [0.0, math.nan]])
def test_flags_are_ored_not_summed(found_infs):
    assert updated(8.0, 2, found_infs) == [4.0, 0, 1]
    assert updated(8.0, 2, [0.0, 0.0]) == [16.0, 0, 0]


def test_the_scale_stays_within_its_bounds():
    assert updated(4.0, 0, [1.0], low=3.0) == [3.0, 0, 1]
    assert updated(0.0, 0, [1.0], low=3.0) == [3.0, 0, 1]
    assert updated(8.0, 2, [0.0], high=9.0) == [9.0, 0, 0]
    assert updated(math.inf, 0, [1.0], high=9.0) == [9.0, 0, 1]
    assert updated(1.0, 0, [0.0], low=2.0) == [2.0, 1, 0]


def test_only_overflows_in_a_row_are_counted():
    assert updated(8.0, 0, [1.0], skips=41)[2] == 42
    assert updated(8.0, 0, [0.0], skips=41)[2] == 0
