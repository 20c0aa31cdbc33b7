"""The GPU's casts of weights, on CPU tensors."""

import pytest
import torch

pytest.importorskip("triton")
from ampcompile.kernels import tables
from ampcompile.kernels.triton import cast_many
from tests.compiling import same_bits
from tests.kernels.triton import OTHERS

pytestmark = pytest.mark.usefixtures("emulated")
CHUNK = 512
SIZES = (0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few programs, each of few numbers."""
    monkeypatch.setattr(cast_many, "CHUNK", CHUNK)
    monkeypatch.setattr(cast_many, "BLOCK", 128)
    cast_many._constants.cache_clear()
    yield
    cast_many._constants.cache_clear()


def weights_of(dtype):
    edges = torch.tensor([0.0, -0.0, 65504.0, 65520.0, 3.4e38, 1e-8, 2.0**-25, 1e-41, torch.inf, -torch.inf, torch.nan])
    # Every kind of tie and near-tie of bfloat16, at all exponents and both signs.
    halves = torch.randint(-(2**31), 2**31, (600,)).bitwise_and(~0xFFFF)
    ties = (halves + torch.tensor([0x7FFF, 0x8000, 0x8001]).repeat(200)).to(torch.int32).view(torch.float32)
    sizes = [torch.randn(size) * torch.exp(8 * torch.randn(size)) for size in SIZES]
    odd = [torch.randn(CHUNK + 9)[1:], torch.randn(20, 30).t()]
    return [tensor.to(dtype) for tensor in (*sizes, edges, ties, *odd)]


def assert_same_bits(copies, weights):
    assert same_bits(copies, [weight.to(copy.dtype) for copy, weight in zip(copies, weights, strict=True)])


@pytest.mark.parametrize(
    "emulated", [90, *(pytest.param(each, marks=pytest.mark.ci) for each in OTHERS)], ids=str, indirect=True
)
@pytest.mark.parametrize("source", [torch.float64, torch.float32])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_casts(source, target, emulated):
    weights = weights_of(source)
    copies = [torch.full_like(weight, torch.nan, dtype=target) for weight in weights]
    cast_many.cast_many_(copies, weights)
    assert_same_bits(copies, weights)


@pytest.mark.parametrize("source", [torch.float64, torch.float32])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_casts_in_a_capture(source, target, monkeypatch):
    monkeypatch.setattr(tables, "capturing", lambda device: True)
    cast_many._constants.cache_clear()
    weights = weights_of(source)
    copies = [torch.full_like(weight, torch.nan, dtype=target) for weight in weights]
    cast_many.cast_many_(copies, weights)
    assert_same_bits(copies, weights)
    cast_many.cast_many_([empty := torch.empty(0, dtype=target)], [torch.empty(0, dtype=source)])
    assert not empty.numel()


def test_each_pair_of_dtypes_has_its_launch(monkeypatch):
    launched, start = [], cast_many.start
    monkeypatch.setattr(cast_many, "start", lambda *how: (launched.append(how), start(*how)))
    pairs = [(source, to) for source in cast_many.TYPES for to in (torch.float16, torch.bfloat16) if source != to]
    weights = [torch.randn(700, dtype=source) for source, _ in pairs * 2]
    copies = [torch.empty(700, dtype=target) for _, target in pairs * 2]
    cast_many.cast_many_(copies, weights)
    assert_same_bits(copies, weights)
    assert len(launched) == len(pairs) == 6


def test_nothing_but_the_copies_is_written():
    memory = torch.full((4, CHUNK + 50), 7.0, dtype=torch.bfloat16)
    weights = [torch.randn(size) for size in (CHUNK + 3, 17, CHUNK, 0)]
    copies = [memory[i, 8 : 8 + len(weight)] for i, weight in enumerate(weights)]
    cast_many.cast_many_(copies, weights)
    assert_same_bits(copies, weights)
    for i, weight in enumerate(weights):
        assert (memory[i, :8] == 7).all() and (memory[i, 8 + len(weight) :] == 7).all()
