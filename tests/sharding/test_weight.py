"""A sharded weight is a plain parameter to Dynamo, tells of eager readers, and refuses them once it is in 16 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.errors import ShardingError
from ampcompile.sharding.weight import LOW, STAYS, UNKNOWN, Gather, ShardedWeight, gathers_of


def made(low: bool = False) -> tuple[nn.Linear, Gather]:
    layer, gather = nn.Linear(4, 3), Gather("blocks.0.up.weight")
    gather.param, gather.dtype = SimpleNamespace(idle=lambda: True, switch=lambda dtype: None), torch.bfloat16
    gather.attach(layer.weight)
    gather.attach(layer.weight)  # as after each gather
    if low:
        gather.rounded_to.add(torch.bfloat16)
        gather.settle(LOW)
    return layer, gather


READERS: dict[str, Any] = {
    "linear": lambda w: nn.functional.linear(torch.ones(4), w),
    "float": lambda w: w.float(),
    "mul": lambda w: 2 * w,
    "cat": lambda w: torch.cat([w, w]),
    "_foreach_norm": lambda w: torch._foreach_norm([w]),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "T": lambda w: w.T,
    "numpy": lambda w: w.numpy(force=True),
    "__getitem__": lambda w: w[0],
    "data_ptr": lambda w: w.data_ptr(),
    "untyped_storage": lambda w: w.untyped_storage(),
    "__repr__": repr,
}


@pytest.mark.parametrize("name", READERS)
def test_an_eager_reader_is_noted_at_first_and_refused_later(name: str) -> None:
    layer, gather = made()
    READERS[name](layer.weight)
    assert gather.reader == f"{name} in eager code" and gather.vote() == STAYS
    assert type(layer.weight) is ShardedWeight
    layer, gather = made(low=True)
    with pytest.raises(ShardingError, match=f"blocks.0.up.weight gathered in bf16.*{name} in eager code.*'fp32'"):
        READERS[name](layer.weight)


def test_metadata_and_gradients_are_free() -> None:
    layer, gather = made(low=True)
    weight = layer.weight
    assert weight.shape == (3, 4) and weight.size(0) == weight.stride(0) - 1 == 3 and weight.numel() == 12
    assert weight.dtype == torch.float32 and weight.requires_grad and weight.is_contiguous() and weight.is_leaf
    weight.grad = torch.zeros_like(weight)
    assert type(weight.grad) is torch.Tensor and len(weight) == 3 and hash(weight) == id(weight)
    weight.requires_grad_(False)
    assert not gather.reader


def test_ranks_agree_by_the_least_vote() -> None:
    _, gather = made()
    assert gather.vote() == UNKNOWN and "no graph has read it" in gather.record().because
    gather.rounded_to.add(torch.bfloat16)
    assert gather.vote() == LOW and "haven't agreed" in gather.record().because
    with torch.inference_mode():
        assert gather.vote() == UNKNOWN, "memory made now would be of no use for training"
    gather.settle(UNKNOWN)
    assert not gather.settled and not gather.is_low
    gather.rounded_to.add(torch.float16)
    assert gather.vote() == STAYS and gather.record().because == "compiled graphs round it to f16"
    _, other = made()
    other.settle(STAYS)
    assert other.settled and other.record().because == "read in float32 by another rank"


def test_a_graph_that_rounds_to_another_type_is_refused() -> None:
    layer, gather = made(low=True)
    with pytest.raises(ShardingError, match="rounds it to f16"):
        gather.rounded_numbers(layer.weight, torch.float16)


def test_who_else_reads_a_weight_may_write_it() -> None:
    """Then graphs get numbers rounded for each call."""
    layer, gather = made()
    gather.read_in_float32("someone")
    before = gather.rounded_numbers(layer.weight, torch.bfloat16)
    with torch.no_grad():
        layer.weight.data.add_(1.0)
    after = gather.rounded_numbers(layer.weight, torch.bfloat16)
    assert after.dtype == torch.bfloat16 and not torch.equal(before, after)


def test_modules_without_a_policy_have_no_gathers() -> None:
    assert gathers_of(nn.Linear(2, 2)) == gathers_of(len) == []
