"""The words of a weight that are looked at: how many, where, and what chance a write has of being seen."""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn as nn

from ampcompile.weights import weight_stats
from ampcompile.weights.table import STRIDE, places
from tests.weights.bindings import bind
from tests.weights.writers import unseen

BF16 = torch.bfloat16


def offsets(weight: torch.Tensor) -> np.ndarray:
    """The words that are looked at, from the weight's beginning."""
    addresses, nbytes = places(weight)
    return np.unique(addresses[:, None] // 4 + np.arange(nbytes // 4)) - weight.data_ptr() // 4


def words(weight: torch.Tensor) -> bytes:
    """What is there."""
    addresses, nbytes = places(weight)
    return b"".join(ctypes.string_at(address, nbytes) for address in addresses.tolist())


@pytest.mark.parametrize("size", [0, 1, 3, 15])
def test_all_of_a_tiny_one(size: int) -> None:
    assert offsets(torch.empty(size)).tolist() == list(range(size))


def test_every_slice_is_looked_at() -> None:
    for shape in ((64, 32, 8), (50, 256, 1024), (7, 3, 3, 3)):
        weight = torch.empty(shape)
        slices = (places(weight).addresses - weight.data_ptr()) // 4 // weight[0].numel()
        assert set(slices.tolist()) == set(range(shape[0]))


@pytest.mark.parametrize("width", [64, 768, 1000, 4096])
def test_no_column_goes_unseen_for_good(width: int) -> None:
    """Places that are a multiple of the width apart would meet few columns again and again."""
    weight = torch.empty(16384, width)
    found = offsets(weight)
    assert len(set((found % width).tolist())) > 0.4 * min(len(found), width)


def test_one_expert_of_a_stack_rewritten_unseen() -> None:
    experts = nn.Parameter(torch.randn(64, 16, 24))
    binding = bind([BF16])
    binding.copies([experts])
    for expert in range(64):
        unseen(experts)[expert] += 1
        assert torch.equal(binding.copies([experts])[0], experts.detach().to(BF16)), expert


@pytest.mark.parametrize("share", [0.002, 0.01, 0.03])
def test_the_chance_that_the_docs_state(share: float) -> None:
    weight = torch.randn(256, 256)
    count, draws = len(offsets(weight)), 400
    seen = 0
    for _ in range(draws):
        before = words(weight)
        weight += torch.rand(256, 256) < share
        seen += words(weight) != before
    expected = 1 - (1 - share) ** count
    deviation = (draws * expected * (1 - expected)) ** 0.5
    assert abs(seen - draws * expected) < 5 * deviation + 1


def test_a_run_of_a_stride_is_always_seen() -> None:
    weight = torch.zeros(1000, 1000)
    for begin in range(0, weight.numel() - 2 * STRIDE, 9973):
        before = words(weight)
        weight.view(-1)[begin : begin + 2 * STRIDE] += 1
        assert words(weight) != before


def test_a_tensor_that_is_no_parameter_has_to_earn_its_copy() -> None:
    buffer = torch.zeros(8, 64)
    binding = bind([BF16], on_trial=[True])
    view = unseen(buffer)
    for step in range(20):
        view[:] = 0
        view[:, (step + 3) % 64] = 1.0
        assert torch.equal(binding.copies([buffer])[0], buffer.to(BF16))
    casts = weight_stats().casts
    for _ in range(20):
        binding.copies([buffer])
    assert weight_stats().casts == casts
    view[0, 41] = 3.0  # where no sample lies: it has earned the copy, and is seen as a weight is
    assert not torch.equal(binding.copies([buffer])[0], buffer.to(BF16))
