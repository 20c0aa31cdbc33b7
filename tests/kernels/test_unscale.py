"""Unscaling in place equals torch's kernel bit for bit, and finds more."""

import math
from copy import deepcopy

import pytest
import torch

from ampcompile.kernels.unscale import unscale_
from tests.kernels.references import unscale_reference_
from tests.scaler.cases import GRAD_DTYPES, assert_equal, odd_tensors


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
def test_one_bad_element_anywhere_is_found(dtype, value, multiplier, engine):
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
