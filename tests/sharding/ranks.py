"""Run by test_decide.py: FSDP2 with 16-bit gathers, beside eager autocast on whole weights; rank 0 writes what failed."""

import contextlib
import functools
import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile import Policy, ShardingError, shard_policy
from tests.compiling import LOW
from tests.ranks import join, leave

CASES = {}
WORLD_OF_FOUR = set()
gathered = []


def case(f):
    CASES[f.__name__] = f
    return f


def counting(call):
    def counted(self, output_tensor, input_tensor, group, async_op=False):
        gathered.append(input_tensor.nbytes)
        return call(self, output_tensor, input_tensor, group, async_op)

    return counted


collectives.DefaultAllGather.__call__ = counting(collectives.DefaultAllGather.__call__)


class Block(nn.Module):
    def __init__(self, width=16, inner=35):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        nn.init.normal_(self.norm.weight, 1.0, 0.1)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that two ranks can't halve; `through` calls the blocks."""

    def __init__(self, through=lambda block, x: block(x)):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.norm, self.head = nn.ModuleList([Block(), Block()]), nn.LayerNorm(16), nn.Linear(16, 3)
        self.through = through

    def forward(self, x):
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))


def batch(i, rank=None):
    g = torch.Generator().manual_seed(100 + 7 * i + (dist.get_rank() if rank is None else rank))
    return torch.randn(6, 16, generator=g)


def loss_of(outputs):
    return outputs.float().square().mean()


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def expected(model, steps, accumulated=1, low=LOW, frozen=()):
    """Losses and weights of eager autocast with whole weights; the gradients of all ranks are averaged by hand."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        for k in range(accumulated):
            with torch.autocast("cpu", low):
                loss = loss_of(model(batch(10 * i + k)))
            (loss / accumulated).backward()
        losses.append(loss.detach().clone())
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
    return losses + [full(p) for p in model.parameters()]


def compile_(f, low=LOW, lower="aot_eager"):
    return torch.compile(f, backend="amp", options={"dtype": low, "lower": lower, "products": "torch"})


def sharded(model, how="by_block", lower="aot_eager", low=LOW, **options):
    for block in model.blocks:
        if how == "by_block":
            block.forward = compile_(block.forward, low, lower)
        fully_shard(block, **options)
    if how == "by_block":
        model.head.forward = compile_(model.head.forward, low, lower)
    fully_shard(model, **options)
    return compile_(model, low, lower) if how == "whole" else model


def train(run, model, steps, accumulated=1, low=LOW, after=lambda i: None):
    """Losses, and the bytes that each step gathered."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses, sizes = [], []
    for i in range(steps):
        optimizer.zero_grad()
        gathered.clear()
        for k in range(accumulated):
            model.set_requires_gradient_sync(k == accumulated - 1)
            with torch.autocast("cpu", low):
                loss = loss_of(run(batch(10 * i + k)))
            (loss / accumulated).backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        sizes.append(sum(gathered))
        after(i)
    return losses, sizes


def same(found, wanted):
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), f"{i}: {(ours - theirs).abs().max():.2e} apart"


def check(how="by_block", lower="aot_eager", steps=5, accumulated=1, low=LOW, make=Model, **options):
    model, ask_late = make(), options.pop("ask_late", 0)
    run = sharded(model, how, lower, low, **options)
    asked = [] if ask_late else [shard_policy(model, low)]
    after = lambda i: asked.append(shard_policy(model, low)) if i + 1 == ask_late else None
    losses, sizes = train(run, model, steps, accumulated, low, after)
    wanted = expected(make(), steps, accumulated, low)
    if lower == "inductor":
        for ours, theirs in zip(losses + [full(p) for p in model.parameters()], wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    else:
        same(losses + [full(p) for p in model.parameters()], wanted)
    records = asked[0].records()
    narrow = {record.weight for record in records if record.gathered_as == "bf16" or record.gathered_as == "f16"}
    assert narrow == {r.weight for r in records if "norm" not in r.weight}, str(asked[0])
    gathers = sizes[0] // sum(-(-len(p) // options.get("ranks", 2)) * p[0].numel() * 4 for p in make().parameters())
    saved = sum(-(-len(p) // 2) * p[0].numel() * 2 for n, p in make().named_parameters() if "norm" not in n)
    print(how, lower, sizes, gathers, saved)
    return sizes, asked[0]


@case
def by_block():
    sizes, decided = check()
    assert sizes[-1] < 0.53 * sizes[0], sizes
    print(decided)


def main():
    join()
    outcomes = {}
    chosen = {name: run for name, run in CASES.items() if not sys.argv[2:] or name in sys.argv[2:]}
    for name, run in chosen.items():
        torch._dynamo.reset()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
                run()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = f"rank {dist.get_rank()}: {traceback.format_exc()}"
            print(name, outcomes[name], flush=True)
        dist.barrier()
    gathered_outcomes = [None] * dist.get_world_size()
    dist.all_gather_object(gathered_outcomes, outcomes)
    if dist.get_rank() == 0:
        joined = {name: "".join(outcome[name] for outcome in gathered_outcomes) for name in chosen}
        Path(sys.argv[1], "outcomes.json").write_text(json.dumps(joined))
    leave()


if __name__ == "__main__":
    main()
