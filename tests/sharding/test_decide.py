"""FSDP2 with 16-bit gathers gives eager autocast's bits for half the bytes, on two ranks and on four."""

from types import SimpleNamespace

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ampcompile.policy import Policy
from ampcompile.sharding.decide import Root
from ampcompile.sharding.weight import STAYS, UNKNOWN, Gather
from tests.ranks import assert_all_pass
from tests.sharding import ranks


@pytest.fixture
def root(tmp_path):
    """A root in a world of one rank, with one weight that could be switched; `votes`: the calls that asked about it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    root, gather = Root(fully_shard(torch.nn.Linear(2, 2), mesh=mesh)), Gather("block.weight")
    gather.param, root.gathers, root.votes = SimpleNamespace(mesh=mesh), [gather], []
    gather.vote = lambda: root.votes.append(root.calls) or UNKNOWN
    yield root
    torch.distributed.destroy_process_group()


def test_ranks_vote_early_and_then_ever_more_rarely(root):
    for _ in range(40):
        root.before_forward(root.module, ())
    assert root.votes == [*range(1, 9), 16, 32]


def test_nobody_votes_on_what_the_policy_or_a_vote_has_settled(root):
    (gather,) = root.gathers
    root.choose(torch.bfloat16, Policy(modules=(("block", "fp32"),)))
    root.before_forward(root.module, ())
    assert gather.kept == "the policy" and root.votes == []
    root.choose(torch.bfloat16, Policy())
    root.before_forward(root.module, ())
    assert gather.kept == "" and root.votes == [1]
    gather.settle(STAYS)
    root.before_forward(root.module, ())
    assert gather.reader == "another rank" and root.votes == [1]


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gathers_in_16_bits_change_no_number(size, tmp_path):
    wanted = {name for name in ranks.CASES if (name in ranks.WORLD_OF_FOUR) == (size == 4)}
    assert_all_pass("tests.sharding.ranks", tmp_path, wanted, size=size)
