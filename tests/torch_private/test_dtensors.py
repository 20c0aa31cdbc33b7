"""A rank's parts of DTensors are handed out where they are distributed as their weights are."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ampcompile.torch_private import storages


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
