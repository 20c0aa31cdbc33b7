"""Many casts at once equal one cast at a time, in any layout, and raise versions."""

from itertools import product

import pytest
import torch

from ampcompile.kernels import tables
from ampcompile.kernels.cast_many import cast_many_
from tests.compiling import same_bits
from tests.kernels.engines import OTHERS

SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TARGETS = (torch.float16, torch.bfloat16)
on_gpus = pytest.mark.parametrize(
    "engine", [0, 90, *(pytest.param(each, marks=pytest.mark.ci) for each in OTHERS)], ids=str, indirect=True
)


def weights_of(dtype, sizes=(1, 5, 8191, 8192, 8193, 30000)):
    """Odd addresses, dense layouts, numbers at the edges of both formats, and all kinds of ties of bfloat16."""
    edges = torch.tensor([0.0, -0.0, 65504.0, 65520.0, 3.4e38, 1e-8, 2.0**-25, 1e-41, torch.inf, -torch.inf, torch.nan])
    halves = torch.randint(-(2**31), 2**31, (600,)).bitwise_and(~0xFFFF)
    ties = (halves + torch.tensor([0x7FFF, 0x8000, 0x8001]).repeat(200)).to(torch.int32).view(torch.float32)
    tensors = [torch.randn(size) * torch.exp(8 * torch.randn(size)) for size in sizes]
    tensors += [
        edges,
        ties,
        torch.randn(sizes[-1] + 9)[1:],
        torch.empty(0, 3),
        torch.randn(()),
        torch.randn(40, 30).t(),
    ]
    tensors += [torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)]
    return [tensor.to(dtype) for tensor in tensors]


def check(weights, copies):
    versions = [copy._version for copy in copies]
    cast_many_(copies, weights)
    for copy, weight, version in zip(copies, weights, versions, strict=True):
        expected = weight.to(copy.dtype)
        assert same_bits(copy, expected) and copy.stride() == expected.stride() and copy._version > version


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), list(product(SOURCES, TARGETS)))
def test_on_a_real_gpu(source, target):
    weights = [weight.cuda() for weight in weights_of(source)]
    check(weights, [torch.full_like(weight, 7.0, dtype=target) for weight in weights])


@on_gpus
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("source", "target"), [(torch.float64, torch.float16), (torch.float32, torch.bfloat16)])
def test_equals_one_cast_at_a_time_and_writes_nothing_else(source, target, captured, engine, monkeypatch):
    monkeypatch.setattr(tables, "capturing", lambda device: captured)
    weights = weights_of(source, engine.sizes)
    check(weights, [torch.full_like(weight, torch.nan, dtype=target) for weight in weights])
    memory = torch.full((len(engine.sizes), engine.sizes[-1] + 50), 7.0, dtype=target)
    within = [row[8 : 8 + size] for row, size in zip(memory, engine.sizes, strict=True)]
    check(weights[: len(within)], within)
    for row, copy in zip(memory, within, strict=True):
        assert (row[:8] == 7).all() and (row[8 + len(copy) :] == 7).all()


def test_dtypes_may_be_mixed(engine):
    pairs = list(product(SOURCES, TARGETS)) * 2
    check([torch.randn(700, dtype=source) for source, _ in pairs], [torch.empty(700, dtype=to) for _, to in pairs])
