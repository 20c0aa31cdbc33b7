"""Run by test_distributed.py: what each rank does."""

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampcompile
from ampcompile.kernels import native
from ampcompile.optim import FusedOptimizer
from ampcompile.optim.fused_step import step_of
from ampcompile.optim.keep_masters import keep_masters
from ampcompile.optim.masters import masters_of
from ampcompile.scaler.grad_scaler import GradScaler
from tests.pairs import pairs
from tests.ranks import join, leave
from tests.scaler.cases import assert_close, assert_equal

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def model(dtype: torch.dtype = torch.float32, *meshes, layers: bool = False) -> nn.Module:
    """The same on all ranks; sharded if there is a mesh, which may be None; `layers`: each by itself, too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    for mesh in meshes:
        for layer in (net[0], net[2]) if layers else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def batch(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(4, 6, dtype=dtype)


def train(net: nn.Module, scaler: GradScaler, optimizer: torch.optim.Optimizer, how: str) -> list[bool]:
    """Six iterations, in the second of which one rank alone overflows; which of them were skipped."""
    rank, skipped = dist.get_rank(), []
    for i in range(6):
        x = batch(10 * i + rank)
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
            (net(batch(10 * i + rank)).square().mean() / dist.get_world_size()).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def full(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [full(param) for param in net.parameters()]


def assert_written(net: nn.Module, before: list[int]) -> None:
    assert all(param._version > version for param, version in zip(net.parameters(), before, strict=True))


def check(wrapper: str, kind: str, how: str) -> None:
    net = model(torch.float32, None, layers=True) if wrapper == "fsdp" else DistributedDataParallel(model())
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**10), OPTIMIZERS[kind](net.parameters())
    assert train(net, scaler, optimizer, how) == [False, True, False, False, False, False]
    assert scaler.get_scale() == 2.0**9
    expected = model()
    plain(expected, OPTIMIZERS[kind](expected.parameters()), how == "clip_grad_norm_")
    assert_close(whole(net), whole(expected))
    step = step_of(optimizer)
    assert (step is None) is (kind == "RMSprop") and (step is None or step.reason is None)


def check_steps(make, mesh, dtype: torch.dtype = torch.float32) -> None:
    """Without scaling, clipped by torch's function, and with weights that only some ranks have a part of: the steps of
    whole ones. Those are torch's for an optimizer of torch's, which a scaler steps that is switched off.
    """
    nets = [model(dtype, mesh, layers=True), model(dtype)]
    optimizers = [make(net.parameters()) for net in nets]
    ours, scaler = isinstance(optimizers[0], FusedOptimizer), GradScaler("cpu", enabled=False)
    for i in range(4):
        for net in nets:
            net.zero_grad()
            net(batch(i, dtype)).float().square().mean().backward()
            nn.utils.clip_grad_value_(net.parameters(), 1e-2)
        versions = [param._version for param in nets[0].parameters()]
        optimizers[0].step() if ours else scaler.step(optimizers[0])
        optimizers[1].step()
        assert_written(nets[0], versions)
        assert step_of(optimizers[0]).reason is None
        if i == 2:
            optimizers[0].load_state_dict(optimizers[0].state_dict())
    assert_close(*map(whole, nets))
    set_optimizer_state_dict(nets[0], optimizers[0], get_state_dict(nets[0], optimizers[0])[1])
    if dtype == torch.float32:  # shards of masters are saved otherwise
        for mine, theirs in zip(*(optimizer.state_dict()["state"].values() for optimizer in optimizers), strict=True):
            assert_close([full(value) for value in mine.values()], list(theirs.values()))
    if ours and dtype == torch.float32:
        norms = [optimizer.clip_grad_norm_(1e-3) for optimizer in optimizers]
        assert_close([full(norms[0])], [norms[1]])
    optimizers[0].step()  # torch's own goes on from there


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The float32 weights of a checkpoint, whole."""
    kept = masters_of(optimizer)
    assert kept is not None
    params = optimizer.param_groups[0]["params"]
    return [full(kept.read_weight(param.detach(), optimizer.state[param])) for param in params]


def steps(numbers: range, *sides: tuple[nn.Module, torch.optim.Optimizer, GradScaler]) -> None:
    """The same batch for all ranks, clipped by value; the third overflows if the scaler would see it."""
    for i in numbers:
        x = batch(i, torch.bfloat16)
        for net, optimizer, scaler in sides:
            net.zero_grad()
            scaler.scale(net(x * math.inf if i == 2 and scaler.is_enabled() else x).float().square().mean()).backward()
            scaler.clip_grad_value_(optimizer, 1e-2)
            scaler.step(optimizer)
            scaler.update()


def check_masters(kind: str, how: str, mesh, enabled: bool) -> None:
    """Steps of 16-bit shards are fused, with the bits of those of whole parameters; torch's own are as precise."""
    nets = [model(torch.bfloat16), model(torch.bfloat16, mesh)]
    optimizers = [OPTIMIZERS[kind](net.parameters()) for net in nets]
    for optimizer in optimizers:
        keep_masters(optimizer, how)
    scalers = [GradScaler("cpu", 4.0, enabled=enabled) for _ in nets]
    before = [param._version for param in nets[1].parameters()]
    steps(range(5), *zip(nets, optimizers, scalers, strict=True))
    assert_written(nets[1], before)
    for optimizer in optimizers:
        assert step_of(optimizer).reason is None
    assert_equal(*map(whole, nets))
    assert_equal(masters(optimizers[1]), masters(optimizers[0]))
    shard = (param := next(nets[1].parameters())).to_local().detach()
    before = shard.clone()
    shard.mul_(1 + dist.get_rank() / 2)  # what a rank writes counts as it is, and other shards keep their remainders
    changed, (written, *_), (held, *_) = full(param) != next(nets[0].parameters()), *map(masters, optimizers[::-1])
    assert torch.equal(written, torch.where(changed, full(param).float(), held)) and changed.any()
    shard.copy_(before)
    assert_equal(masters(optimizers[1]), masters(optimizers[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda *_: False)
        steps(range(5, 6), *zip(nets, optimizers, scalers, strict=True))
        assert step_of(optimizers[1]).reason.endswith(": no C++ compiler works here")
    assert_close(masters(optimizers[1]), masters(optimizers[0]))  # torch's rounds a tensor's last elements otherwise
    steps(range(6, 7), *zip(nets, optimizers, scalers, strict=True))
    assert_close(masters(optimizers[1]), masters(optimizers[0]))


def check_checkpoint(kind: str, mesh, other, folder: Path) -> None:
    """A checkpoint of shards goes on with its bits, on the same ranks and on others, whichever is loaded first."""
    scaler, net = GradScaler("cpu", enabled=False), model(torch.bfloat16, mesh)
    optimizer = OPTIMIZERS[kind](net.parameters())
    keep_masters(optimizer)
    steps(range(4), (net, optimizer, scaler))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    names = {name for state in optimizer_state["state"].values() for name in state}
    assert "master_param" in names and not names & {"remainder", "checksums"}
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    at_save = masters(optimizer)
    assert not torch.equal(at_save[0], full(next(net.parameters())).float())
    steps(range(4, 7), (net, optimizer, scaler))
    for how, where, model_first in (
        ("remainder", mesh, True),
        ("remainder", other, False),
        ("float32", other, False),
        ("float32", None, False),
    ):
        again = model(torch.bfloat16, *([where] if where else []))
        for param in again.parameters():
            param.data.mul_(0.5)
        resumed = OPTIMIZERS[kind](again.parameters())
        keep_masters(resumed, how)
        states = dict(zip(("model", "optimizer"), get_state_dict(again, resumed), strict=True))
        checkpoint.load(states, checkpoint_id=folder)
        if model_first:
            set_model_state_dict(again, states["model"])
        set_optimizer_state_dict(again, resumed, states["optimizer"])
        if not model_first:
            set_model_state_dict(again, states["model"])
        restored = [full(state["master_param"]) for state in resumed.state_dict()["state"].values()]
        assert_equal(restored, at_save)
        steps(range(4, 7), (again, resumed, scaler))
        if how == "remainder":
            assert_equal(masters(resumed), masters(optimizer))


if __name__ == "__main__":
    join()
    for kind, how in (("AdamW", "clip_grad_norm_"), ("SGD", "step"), ("RMSprop", "unscale_")):
        print(kind, how)
        check("fsdp", kind, how)
    check("ddp", "AdamW", "clip_grad_norm_")  # whose gradients are plain tensors
    meshes = [None] if dist.get_world_size() == 2 else [init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))]
    for mesh in meshes:
        for kind in ("AdamW amsgrad", "Adam fused", "SGD momentum"):
            check_steps(OPTIMIZERS[kind], mesh)
        for kind in (ampcompile.optim.SGD, ampcompile.optim.AdamW):
            check_steps(partial(kind, lr=0.01), mesh)
            check_steps(partial(kind, lr=0.01, masters="remainder"), mesh, torch.bfloat16)
    size, folder = dist.get_world_size(), Path(os.environ["RENDEZVOUS"]).parent
    one = init_device_mesh("cpu", (size,))
    other = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    kinds = ("AdamW fused", "SGD momentum")
    for kind, how, enabled in pairs(kinds, ("remainder", "float32"), (False, True)):
        print(kind, how, enabled)
        check_masters(kind, how, one, enabled)
    for kind in kinds:
        check_checkpoint(kind, one, other, folder / kind)
    leave()
