"""Run by test_ranks.py: ways to use several devices x whole, by block x 16-bit type x loop, beside eager autocast.

In bfloat16 all losses and weights have the bits of the same loop run eagerly. In float16 `ampcompile.GradScaler`
scales, clips and steps where torch's own does beside it: the first gradients have its bits, the weights at the end are
as near to a float64 run of one process on all batches. FSDP2 gathers in 16 bits, as many bytes as paper.py says.

Not among the combinations:
- a number of ranks for `reshard_after_forward` where two ranks, or two in HSDP's shard dimension, hold the shards: it
  has to divide them and be neither 1 nor all;
- pipelines compiled whole across stages: stages are processes, so "whole" is a stage in one graph;
- accumulation without gradient sync under tensor and sequence parallelism and pipelines: no gradient is synchronized at
  a step's end there (a pipeline's microbatches are the accumulation);
- 16-bit gathers of weights that are DTensors before FSDP shards them (`fsdp_tp`), or that are sharded over fewer ranks
  until backward (`fsdp_int`): they stay float32, and are counted.
"""

import contextlib
import functools
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ampcompile
from tests.compiling import HALF, LOW, error
from tests.ranks import run_cases
from tests.sharding import gathers
from tests.sharding.gathers import Block, Model, compile_, full, gathered, loss_of, narrow, same
from tests.sharding.paper import sent

STEPS, SAVED_AFTER = 5, 2
batch = functools.partial(gathers.batch, rows=6)


class Replicated(ParallelStyle):
    """Whole weights on each rank, as DTensors: torch clips no mixture of these and plain ones."""

    def _apply(self, module, mesh):
        def give(module, inputs, mesh):
            return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

        return distribute_module(module, mesh, None, give, lambda module, output, mesh: output.to_local())


TENSOR = {
    "blocks.*.norm": Replicated(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "norm": Replicated(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE = {
    "blocks.*.norm": SequenceParallel(sequence_dim=0),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
}


class Even(Model):
    """Sizes that two ranks halve."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(inner=32), Block(inner=32)]), nn.Linear(16, 4)


class Stage(Model):
    """A block, on the last rank with the head; the parts have the names that they have in the whole."""

    def __init__(self):
        super().__init__()
        rank = dist.get_rank()
        self.blocks = nn.ModuleDict({str(rank): self.blocks[rank]})
        if rank == 0:
            self.norm = self.head = None

    def forward(self, x):
        (block,) = self.blocks.values()
        x = block(x)
        return x if self.head is None else self.head(self.norm(x))


KINDS = {"ddp": 2, "fsdp": 2, "fsdp_keep": 2, "fsdp_int": 4, "hsdp": 4, "tp": 2, "sp": 2, "fsdp_tp": 4, "pipeline": 2}
"""On how many ranks."""
RESHARD = {"fsdp_keep": False, "fsdp_int": 2}


@functools.cache
def mesh_of(kind):
    names = {"hsdp": ("replicas", "data"), "fsdp_tp": ("data", "model"), "tp": ("model",), "sp": ("model",)}
    names = names.get(kind, ("data",))
    return init_device_mesh("cpu", (2, 2) if len(names) == 2 else (KINDS[kind],), mesh_dim_names=names)


class Training(gathers.Saved):
    """One rank's part of a training; `compile_it` is "whole", "by_block", or empty for eager autocast."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)  # stages have parameter groups of their own

    def __init__(self, kind, compile_it, low):
        self.kind, self.low, mesh = kind, low, mesh_of(kind)
        self.model = self.run = model = {"tp": Even, "sp": Even, "fsdp_tp": Even, "pipeline": Stage}.get(kind, Model)()
        names = mesh.mesh_dim_names
        if "model" in names:
            parallelize_module(model, mesh["model"], SEQUENCE if kind == "sp" else TENSOR)
        blocks = [*(model.blocks.values() if kind == "pipeline" else model.blocks)]
        if compile_it == "by_block":
            for part in filter(None, (*blocks, model.head)):
                part.forward = self.compiled(part.forward)
        self.decided = None
        if "fsdp" in kind or kind == "hsdp":
            shards = mesh["data"] if kind == "fsdp_tp" else mesh
            for block in blocks:
                fully_shard(block, mesh=shards, reshard_after_forward=RESHARD.get(kind, True))
            fully_shard(model, mesh=shards)
            self.decided = ampcompile.shard_policy(model, low) if compile_it else None
        if kind == "ddp":
            self.run = DistributedDataParallel(model)
        if compile_it == "whole":
            self.run = self.compiled(self.run)
        # Of a mesh with a dimension for the model, all ranks along it get the same batch.
        self.rank = {"tp": 0, "sp": 0, "pipeline": 0, "fsdp_tp": dist.get_rank() // 2}.get(kind, dist.get_rank())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = ampcompile.GradScaler if compile_it and low == HALF else torch.amp.GradScaler
        self.scaler = scaler("cpu", init_scale=2.0**10, enabled=low == HALF)

    def compiled(self, f):
        return compile_(f, self.low, outputs="autocast")

    def backward(self, step, count):
        """The losses of `count` batches, whose gradients are averaged."""
        batches = [batch(10 * step + k, self.rank) for k in range(count)]
        if self.kind == "pipeline":
            return self.through_stages(torch.cat(batches), count)
        if self.kind == "sp":
            batches = [x.chunk(2)[dist.get_rank()] for x in batches]
        losses = []
        for x in batches:
            last = len(losses) == count - 1
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(last)
            quiet = self.kind == "ddp" and not last
            ddp = getattr(self.run, "_orig_mod", self.run)
            with ddp.no_sync() if quiet else contextlib.nullcontext():
                with torch.autocast("cpu", self.low, cache_enabled=False):
                    loss = loss_of(self.run(x)) / count
                self.scaler.scale(loss).backward()
            losses.append(loss.detach().clone())
        return losses

    def through_stages(self, x, count):
        if not hasattr(self, "schedule"):
            stage = PipelineStage(self.run, dist.get_rank(), 2, torch.device("cpu"))
            self.schedule = ScheduleGPipe(stage, count, lambda y, target: self.scaler.scale(loss_of(y)))
            self.scaler.scale(torch.ones(()))  # so that the first stage has a scale too
        losses = []
        with torch.autocast("cpu", self.low, cache_enabled=False):
            if dist.get_rank() == 0:
                self.schedule.step(x)
            else:
                self.schedule.step(target=x, losses=losses)
        return [loss.detach().clone() for loss in losses]

    def go(self, steps, count):
        """All losses, the first step's gradients, the weights at the end."""
        found, gradients = [], []
        for step in steps:
            self.optimizer.zero_grad()
            gathered.clear()
            found += self.backward(step, count)
            gradients = gradients or [full(p.grad) for p in self.model.parameters()]
            if self.low == HALF and isinstance(self.scaler, ampcompile.GradScaler):
                self.scaler.clip_grad_norm_(self.optimizer, 0.5)
            elif self.low == HALF:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return found, gradients, [full(p) for p in self.model.parameters()]

    def bytes_of_a_step(self):
        """The shards that this rank gives to gathers: of blocks before backward too, and twice as large if of two."""
        low, plain, total = narrow(self.decided.records()), Model(), 0
        ranks = 4 if self.kind == "fsdp_int" else 2
        for name, p in self.model.named_parameters():
            shape = plain.get_parameter(name).shape
            if self.kind == "fsdp_tp":
                shape = (2 * p.to_local().shape[0], *p.to_local().shape[1:])
            again = {"fsdp_keep": 0, "fsdp_int": 2}.get(self.kind, 1) if name.startswith("blocks") else 0
            total += sent([(shape, name not in low)], ranks, (2, 4), 0, 1 + again) // (ranks - 1)
        return total


def exact(model, kind, count):
    """The weights of a float64 run of one process on the batches of all ranks."""
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ranks = {"ddp": 2, "fsdp": 2, "fsdp_keep": 2, "fsdp_int": 4, "hsdp": 4, "fsdp_tp": 2}.get(kind, 1)
    parts = [[*model.parameters()]]
    if kind == "pipeline":  # each stage clips its own
        parts = [[*model.blocks[0].parameters()], parts[0][len([*model.blocks[0].parameters()]) :]]
    for step in range(STEPS):
        optimizer.zero_grad()
        for k, rank in itertools.product(range(count), range(ranks)):
            (model(batch(10 * step + k, rank).double()).square().mean() / (count * ranks)).backward()
        for part in parts:
            nn.utils.clip_grad_norm_(part, 0.5)
        optimizer.step()
    return dict(model.named_parameters())


def check(kind, how, low, loop):
    count = 2 if loop == "accumulated" or kind == "pipeline" else 1
    losses, gradients, weights = Training(kind, "", low).go(range(STEPS), count)
    ours = Training(kind, how, low)
    if loop == "resumed":
        folder = Path(sys.argv[1], f"{kind}-{how}-{low}")
        before, first, _ = ours.go(range(SAVED_AFTER), count)
        dcp.save(ours.state(), checkpoint_id=folder)
        torch._dynamo.reset()
        ours = Training(kind, how, low).load(folder)
        after, _, found = ours.go(range(SAVED_AFTER, STEPS), count)
        before += after
    else:
        before, first, found = ours.go(range(STEPS), count)
    same(first, gradients)
    if low == LOW:
        same(before + found, losses + weights)
    else:
        wanted = exact((Even if kind in ("tp", "sp", "fsdp_tp") else Model)(), kind, count)
        wanted = [wanted[name] for name, _ in ours.model.named_parameters()]
        near, theirs = error(found, wanted), error(weights, wanted)
        assert near <= 1.1 * theirs, f"{near:.2e} from float64, torch's {theirs:.2e}"
    if ours.decided:
        wide = {r.weight for r in ours.decided.records()} - narrow(ours.decided.records())
        kept = {"fsdp_tp": "", "fsdp_int": "blocks"}.get(kind, "norm")
        assert wide == {n for n, _ in ours.model.named_parameters() if "norm" in n or kept in n}, ours.decided
        assert sum(gathered) == count * ours.bytes_of_a_step(), (sum(gathered), count, ours.bytes_of_a_step())


CASES = {
    f"{kind}-{how}-{'fp16' if low == HALF else 'bf16'}-{loop}": functools.partial(check, kind, how, low, loop)
    for kind, how, low, loop in itertools.product(KINDS, ("whole", "by_block"), (LOW, HALF), ("accumulated", "resumed"))
}
WORLD_OF_FOUR = {name for name in CASES if KINDS[name.split("-")[0]] == 4}

if __name__ == "__main__":
    run_cases(CASES, WORLD_OF_FOUR)
