"""The GPU's quantizing of weights, on CPU tensors."""

import pytest
import torch

pytest.importorskip("triton")
from ampcompile.kernels import fp8, tables
from ampcompile.kernels.triton import quantize_many
from tests.compiling import same_bits


def weights_of(dtype):
    edges = torch.randn(80, 96)
    edges[::3] *= torch.exp2(torch.randint(-130, 120, (27, 96)).float())
    ties = 1 + torch.arange(64 * 16).view(64, 16) / 128  # between the numbers of e4m3, and halfway
    powers = torch.full((16, 16), 1.75) * torch.exp2(torch.arange(16.0))  # a factor's carry, just not and just
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    broken = [torch.randn(16, 32) for _ in range(6)]
    for matrix, value in zip(
        broken, (torch.inf, -torch.inf, torch.nan, 65520.0, 3.3961773e38, 3.3961776e38), strict=True
    ):
        matrix[3, 17] = value
    plain = [torch.randn(64, 64), torch.randn(16, 144), torch.randn(144, 16).t(), torch.zeros(16, 16)]
    return [matrix.to(dtype) for matrix in (*plain, edges, ties, powers, above, *broken)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.ci)], ids=str)
def test_all_parts_of_many_weights_with_one_scale_and_with_one_for_each_row(dtype, captured, on_a_gpu, monkeypatch):
    on_a_gpu.need_8_bits()
    monkeypatch.setattr(tables, "capturing", lambda device: captured)
    weights = 2 * weights_of(dtype)
    kinds = [2 * i < len(weights) for i in range(len(weights))]
    ours, expected = (
        [fp8.buffer_like(w, kind).fill_(torch.nan) for w, kind in zip(weights, kinds, strict=True)] for _ in range(2)
    )
    quantize_many.quantize_many_(weights, ours)
    fp8.quantize_many_reference_(expected, weights)
    for mine, other, weight in zip(ours, expected, weights, strict=True):
        for a, b in zip(fp8.parts(mine, *weight.shape), fp8.parts(other, *weight.shape), strict=True):
            assert same_bits(a.float(), b.float()), weight.shape
