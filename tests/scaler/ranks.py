"""Run by test_distributed.py: what each rank does."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.scaler.master_step import keep_masters
from tests.ranks import join, leave
from tests.scaler.cases import assert_close


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(net: nn.Module, scaler: GradScaler, optimizer: torch.optim.Optimizer, how: str) -> list[bool]:
    """Six iterations, in the second of which one rank alone overflows; which of them were skipped."""
    rank, skipped = dist.get_rank(), []
    for i in range(6):
        torch.manual_seed(10 * i + rank)
        x = torch.randn(4, 6)
        overflows = i == 1 and rank == 1
        sharded = isinstance(net, FSDPModule)
        if overflows and not sharded:
            x = x * math.inf  # reaches the gradients of all ranks
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        if overflows and sharded:
            next(net.parameters()).grad.to_local()[-1, -1] = math.inf  # in the shard of this rank only
        if how == "unscale_":
            scaler.unscale_(optimizer)
        elif how == "clip_grad_norm_":
            norm = scaler.clip_grad_norm_(optimizer, 0.1)
            assert norm.numel() == 1
        scaler.step(optimizer)
        skipped.append(bool(scaler.last_step_skipped))
        scaler.update()
    return skipped


def plain(net: nn.Module, optimizer: torch.optim.Optimizer, clip: bool) -> None:
    """The same training in one process, on the batches of all ranks, without the iteration that overflows."""
    for i in (0, 2, 3, 4, 5):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            torch.manual_seed(10 * i + rank)
            (net(torch.randn(4, 6)).square().mean() / dist.get_world_size()).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def full(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()


def check(wrapper: str, kind: str, how: str) -> None:
    optimizers = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "RMSprop": torch.optim.RMSprop}
    net = model()
    if wrapper == "fsdp":
        fully_shard(net[0])
        fully_shard(net)
    else:
        net = DistributedDataParallel(net)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer = optimizers[kind](net.parameters(), lr=0.01)
    assert train(net, scaler, optimizer, how) == [False, True, False, False, False, False]
    assert scaler.get_scale() == 2.0**9
    expected = model()
    plain(expected, optimizers[kind](expected.parameters(), lr=0.01), how == "clip_grad_norm_")
    assert_close([full(param) for param in net.parameters()], [param.detach() for param in expected.parameters()])
    reason = scaler._records[optimizer].fallback_reason
    assert (reason is None) is (kind != "RMSprop"), reason


def check_unscaled(make, mesh=None) -> None:
    """Without scaling, and with weights that only some ranks have a part of: the steps of torch on whole weights."""
    nets = [model(), model()]
    for layer in nets[0]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(nets[0], mesh=mesh)
    optimizers = [make(net.parameters()) for net in nets]
    scaler = GradScaler("cpu", enabled=False)
    for i in range(4):
        torch.manual_seed(i)
        x = torch.randn(4, 6)
        for net in nets:
            net.zero_grad()
            net(x).square().mean().backward()
        versions = [param._version for param in nets[0].parameters()]
        scaler.step(optimizers[0])
        optimizers[1].step()
        assert all(param._version > before for param, before in zip(nets[0].parameters(), versions, strict=True))
    assert scaler._records[optimizers[0]].fallback_reason is None
    assert_close([full(param) for param in nets[0].parameters()], [param.detach() for param in nets[1].parameters()])
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for key in theirs:
        assert_close([full(v) for v in ours[key].values()], [v for v in theirs[key].values()])
    optimizers[0].step()  # torch's own goes on from there


def check_masters() -> None:
    """Steps of 16-bit shards whose optimizer keeps masters are torch's, as precise as those of whole parameters."""
    nets = [model().bfloat16(), model().bfloat16()]
    fully_shard(nets[0])
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    masters = [keep_masters(optimizer, "float32") for optimizer in optimizers]
    scaler = GradScaler("cpu", enabled=False)
    for i in range(4):
        torch.manual_seed(i)
        x = torch.randn(4, 6, dtype=torch.bfloat16)
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.zero_grad()
            net(x).square().mean().backward()
            scaler.step(optimizer)
    assert masters[0].reason == "a parameter is a DTensor" and masters[1].reason is None
    ours, theirs = (
        [full(optimizer.state[param]["master_param"]) for param in net.parameters()]
        for net, optimizer in zip(nets, optimizers, strict=True)
    )
    assert_close(ours, theirs)


if __name__ == "__main__":
    join()
    for kind, how in (("AdamW", "clip_grad_norm_"), ("SGD", "step"), ("RMSprop", "unscale_")):
        print(kind, how)
        check("fsdp", kind, how)
    check("ddp", "AdamW", "clip_grad_norm_")  # whose gradients are plain tensors
    meshes = [None] if dist.get_world_size() == 2 else [init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))]
    for mesh in meshes:
        check_unscaled(lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True), mesh)
        check_unscaled(lambda params: torch.optim.Adam(params, lr=0.01, fused=True), mesh)
        check_unscaled(lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9), mesh)
    check_masters()
    leave()
