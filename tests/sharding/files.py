"""Run by test_ranks.py: what one process saved goes on under FSDP2, and the reverse, with an unbroken run's bits."""

import copy
import functools
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from ampcompile import GradScaler, optim
from tests.ranks import run_cases
from tests.sharding.gathers import Saved, full, same

KINDS = {"AdamW": {"lr": 0.01}, "SGD": {"lr": 0.01, "momentum": 0.9}}
WAYS = (
    (None, "float32", False),
    (None, "bfloat16", False),
    (None, "8bit", False),
    ("float32", "float32", True),
    ("remainder", "float32", False),
    ("remainder", "8bit", True),
    ("remainder8", "8bit", False),
)
"""Masters, states, and whether the file is flattened"""


class Training(Saved):
    """By one process, or by both as shards, on gradients that are drawn for whole parameters."""

    scaler = GradScaler("cpu")

    def __init__(self, kind, shards, how=None, states="float32", flat=False, seed=0, more=dict):
        torch.manual_seed(seed)
        self.model = nn.ParameterList(torch.randn(rows, 128) for rows in (130, 67, 1))
        self.model.to(torch.float32 if how is None else torch.bfloat16)
        if shards:
            fully_shard(self.model, **more())
        self.optimizer = getattr(optim, kind)(self.model.parameters(), masters=how, states=states, **KINDS[kind])
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def go(self, steps):
        for step in steps:
            random = torch.Generator().manual_seed(step)
            for p in self.model.parameters():
                grad = torch.randn(p.shape, generator=random).to(p.dtype)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if hasattr(p, "placements") else grad
            self.optimizer.step()
            self.optimizer.zero_grad()
        leaves = sorted(
            (keystr(path), leaf) for path, leaf in tree_leaves_with_path(self.state()) if torch.is_tensor(leaf)
        )
        return [full(leaf) for _, leaf in leaves]


def saved_and_continued(kind, how, states, flat, more=dict):
    """By the one process and the two, in either direction; coded plain tensors don't take flattened files."""
    make = functools.partial(Training, kind, how=how, states=states, flat=flat, more=more)
    (unbroken := make(False)).go(range(3))
    wanted = unbroken.go(range(3, 6))
    for shards in (False, True)[: 1 if flat and states != "float32" else 2]:
        folder = Path(sys.argv[1], f"{kind}{how}{states}{flat}{shards}{more.__name__}")
        (first := make(shards)).go(range(3))
        dcp.save(first.state(), checkpoint_id=folder)
        (other := make(not shards, seed=1)).go(range(7, 8))
        same(other.load(folder).go(range(3, 6)), wanted)


def hybrid():
    """Shards inside replicas, which wait on the CPU."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    return {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}


def told_by_rank_0():
    """One rank has the whole states, and tells the other."""
    make = functools.partial(Training, "AdamW", True, "remainder8", "8bit")
    (first := make()).go(range(3))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = copy.deepcopy(get_state_dict(first.model, first.optimizer, options=whole))
    wanted, other = first.go(range(3, 6)), make(seed=1)
    told = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.model, weights, options=told)
    set_optimizer_state_dict(other.model, other.optimizer, states, options=told)
    same(other.go(range(3, 6)), wanted)


CASES = {
    f"{kind}, {how}, {states}, {'flattened' if flat else 'by parameter'}": functools.partial(
        saved_and_continued, kind, how, states, flat
    )
    for kind in KINDS
    for how, states, flat in WAYS
}
CASES["hybrid"] = functools.partial(saved_and_continued, "AdamW", "remainder8", "8bit", False, hybrid)
CASES["told by rank 0"] = told_by_rank_0

if __name__ == "__main__":
    run_cases(CASES)
