"""A rank's parts of DTensors are handed out where they are distributed as their weights are; FSDP2's modules are found.

Gathers in 16 bits are tested by processes of tests/sharding/ranks.py.
"""

import pytest
import torch
from torch import nn

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ampcompile.torch_private import fsdp, storages


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_are_those_of_tensors_that_are_distributed_alike(mesh):
    plain, part = torch.ones(3), torch.ones(3)
    sharded, like, whole, unsummed = (
        DTensor.from_local(part, mesh, [placement], run_check=False)
        for placement in (Shard(0), Shard(0), Replicate(), Partial())
    )
    assert storages.include_dtensors([plain, sharded]) and not storages.include_dtensors([plain])
    first, second, third = storages.local_parts([sharded, plain, None], [like, plain, like])
    assert first.data_ptr() == part.data_ptr() and type(first) is torch.Tensor and second is plain and third is None
    assert storages.local_part(sharded).data_ptr() == part.data_ptr() and storages.local_part(plain) is plain
    for tensor, weight in ((whole, sharded), (plain, sharded), (sharded, plain), (unsummed, unsummed)):
        assert storages.local_parts([tensor], [weight]) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_of_what_is_summed_over_any_dimension_of_the_mesh_there_are_no_parts(mesh):
    square = init_device_mesh("cpu", (1, 1))
    for placements in ([Partial(), Shard(0)], [Shard(0), Partial()]):
        unsummed = DTensor.from_local(torch.ones(3), square, placements, run_check=False)
        assert storages.local_parts([unsummed], [unsummed]) is None


def test_results_under_way_are_those_with_a_gradient():
    result = AsyncCollectiveTensor(torch.ones(2))
    assert not storages.are_under_way([result, torch.ones(2, requires_grad=True)])
    assert storages.are_under_way([torch.ones(2), result.requires_grad_()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_roots_parameters_and_what_cannot_be_gathered_in_16_bits(mesh):
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
