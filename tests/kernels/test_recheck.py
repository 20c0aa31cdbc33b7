"""A sampled comparison finds weights that were rewritten, and casts again what differs."""

import pytest
import torch

from ampcompile.kernels import recheck
from ampcompile.kernels.cast_many import cast_many_
from ampcompile.kernels.recheck import recheck_, recheck_reference_
from tests.compiling import same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = (1, 127, 128, 129, 8191, 8192, 8193, 30000)


def cast_weights(device: str, target: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    weights = [torch.randn(size, device=device) for size in SIZES] + [torch.randn(90, 110, device=device).t()]
    weights[-2][5] = torch.nan
    copies = [torch.empty_like(weight, dtype=target) for weight in weights]
    cast_many_(copies, weights)
    return copies, weights, torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("check", [recheck_, recheck_reference_])
def test_finds_and_repairs_what_was_rewritten(check, target, device):
    copies, weights, changed = cast_weights(device, target)
    check(copies, weights, changed, 1, True)
    assert not changed.item(), "nothing was written, NaN included"
    for written in range(len(weights)):
        changed.zero_()
        torch.from_dlpack(weights[written]).mul_(-1.5)
        check(copies, weights, changed, 1, False)
        assert changed.item()
        assert not same_bits(copies[written], weights[written].to(target))
        check(copies, weights, changed.zero_(), 1, True)
        assert changed.item()
        for copy, weight in zip(copies, weights, strict=True):
            assert same_bits(copy, weight.to(target))
        check(copies, weights, changed.zero_(), 1, False)
        assert not changed.item()


@pytest.mark.parametrize("device", DEVICES)
def test_first_and_last_elements_of_chunks_are_looked_at(device):
    copies, weights, changed = cast_weights(device, torch.bfloat16)
    big = SIZES.index(30000)
    for element in (0, recheck.CHUNK - 1, recheck.CHUNK, 29999):
        torch.from_dlpack(weights[big])[element] += 1
        recheck_(copies, weights, changed.zero_(), 1, True)
        assert changed.item() and same_bits(copies[big], weights[big].bfloat16())
    torch.from_dlpack(weights[big])[1000] += 1
    recheck_(copies, weights, changed.zero_(), 1, True)
    assert not changed.item(), "the limit: an element between samples"


def test_a_zero_that_changes_its_sign_is_a_change():
    weight, changed = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    copy = weight.bfloat16()
    torch.from_dlpack(weight).neg_()
    recheck_([copy], [weight], changed, 1, True)
    assert changed.item() and copy.signbit().all()
