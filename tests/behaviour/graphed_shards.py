"""One rank on a GPU: FSDP2 by block, each block compiled in CUDA graphs, trains as without graphs."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ampcompile
from tests.behaviour.test_cuda_graphs import BF16, GRAPHS, WIDTH, built, same
from tests.ranks import leave


def trained(options: dict[str, Any]) -> list[torch.Tensor]:
    """The losses and the weights of some steps."""
    model = built("cuda")
    for block in model:
        block.compile(backend="amp", options={"dtype": BF16, **options})
        fully_shard(block)
    fully_shard(model)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), ampcompile.GradScaler("cuda")
    said = []
    for turn in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(turn)).cuda()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        said.append(loss.detach().clone())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return said + [param.full_tensor().detach().clone() for param in model.parameters()]


if __name__ == "__main__":
    dist.init_process_group("nccl", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=0, world_size=1)
    assert same(trained(GRAPHS), trained({}))
    leave()
