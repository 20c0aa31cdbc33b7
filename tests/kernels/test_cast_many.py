"""Many casts at once equal one cast at a time, in any layout, and raise versions."""

import pytest
import torch

from ampcompile.kernels.cast_many import cast_many_
from tests.compiling import same_bits
from tests.devices import DEVICES

SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TARGETS = (torch.float16, torch.bfloat16)


def weights_of(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Sizes around those of chunks, odd addresses, dense layouts, and numbers at the edges of both formats."""
    edges = torch.tensor([0.0, -0.0, 65504.0, 65520.0, 3.4e38, 1e-8, 2.0**-25, 1e-41, torch.inf, -torch.inf, torch.nan])
    tensors = [torch.randn(size) * torch.exp(8 * torch.randn(size)) for size in (1, 5, 8191, 8192, 8193, 30000)]
    tensors += [edges, torch.randn(9000)[1:], torch.empty(0, 3), torch.randn(()), torch.randn(40, 30).t()]
    tensors += [torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)]
    return [tensor.to(device).to(dtype) for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_equals_one_cast_at_a_time(source, target, device):
    weights = weights_of(source, device)
    copies = [torch.full_like(weight, 7.0, dtype=target) for weight in weights]
    versions = [copy._version for copy in copies]
    cast_many_(copies, weights)
    for copy, weight, version in zip(copies, weights, versions, strict=True):
        assert same_bits(copy, weight.to(target)) and copy.stride() == weight.to(target).stride()
        assert copy._version > version


def test_dtypes_may_be_mixed():
    weights = [torch.randn(100, dtype=dtype) for dtype in SOURCES for _ in TARGETS]
    copies = [torch.empty(100, dtype=dtype) for _ in SOURCES for dtype in TARGETS]
    cast_many_(copies, weights)
    assert all(torch.equal(copy, weight.to(copy.dtype)) for copy, weight in zip(copies, weights, strict=True))
