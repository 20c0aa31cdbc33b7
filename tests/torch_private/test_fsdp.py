"""FSDP2's modules are found; gathers in 16 bits are tested by processes of tests/sharding/ranks.py."""

import pytest
import torch
from torch import nn

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ampcompile.torch_private import fsdp


@pytest.fixture
def alone(tmp_path):
    """A world of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_roots_parameters_and_what_cannot_be_gathered_in_16_bits(alone):
    first, second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2).double()
    fully_shard(first[0])
    fully_shard(first)
    fully_shard(second, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    model = nn.ModuleDict({"first": first, "again": first, "second": second, "plain": nn.Linear(2, 2)})
    assert fsdp.roots(model) == [first, second] and fsdp.roots(model["plain"]) == []
    found = {name: fsdp.why_not(param) for name, param, _ in fsdp.params_of(first)}
    assert found == dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), "there is nothing to gather")
    assert {fsdp.why_not(param) for _, param, _ in fsdp.params_of(second)} == {"its shards are torch.float64"}
    fsdp.reshard(first)
