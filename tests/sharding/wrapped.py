"""Run by test_ranks.py: DDP and FSDP2 around compiled models, with the gradients of one process on all batches."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ampcompile import weight_stats
from tests.compiling import LOW, compiled, error
from tests.models import Block
from tests.ranks import run_cases
from tests.sharding.gathers import called, checkpointed, full, loss_of

CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def amp(f, **options):
    """Products are torch's own, as in the parts that run eagerly: on some CPUs amp's round a few numbers otherwise."""
    return compiled(f, **{"products": "torch", **options})


class Model(nn.Module):
    """Two blocks; `keep` says how their activations are kept; they share a weight if `tied`."""

    def __init__(self, keep=called, tied=False, inner=32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(16, inner, nn.functional.gelu) for _ in range(2))
        self.head, self.keep = nn.Linear(16, 3), keep
        if tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        for block in self.blocks:
            x = self.keep(block, x)
        return self.head(x)


def selectively(block, x):
    """Products are kept, the rest is computed again."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = functools.partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block, x, use_reentrant=False, context_fn=context)


def batch(i, rank=None):
    torch.manual_seed(100 * i + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, 16)


def gradients(module):
    return [full(p.grad) for p in module.parameters()]


@functools.cache
def alone(make=Model, batches=(0,), **options):
    """The gradients that one process computes on the batches of all ranks."""
    run, _ = amp(model := make(), **options)
    for i in batches:
        for rank in range(dist.get_world_size()):
            (loss_of(run(batch(i, rank))) / dist.get_world_size()).backward()
    torch._dynamo.reset()
    return [p.grad for p in model.parameters()]


def near(found, expected, tolerance=1e-5):
    distance = error(found, expected)
    assert distance < tolerance, f"gradients are {distance:.2e} apart"


def trains(run, module, tolerance=1e-5, make=Model):
    loss_of(run(batch(0))).backward()
    near(gradients(module), alone(make), tolerance)


@case
def ddp_around_the_compiled_model():
    run, recorder = amp(Model())
    ddp = DistributedDataParallel(run)
    trains(ddp, ddp.module)
    assert recorder.graphs


def in_buckets(lower):
    """Dynamo splits the graph where DDP's buckets end; the backend gets fake inputs."""
    wide = functools.partial(Model, inner=8192)  # a megabyte each, the smallest first bucket
    model = wide()
    run, recorder = amp(DistributedDataParallel(model, bucket_cap_mb=1), lower=lower)
    trains(run, model, 1e-5 if lower == "aot_eager" else 1e-2, wide)
    assert len(recorder.graphs) > 1, "not split"
    run(batch(1))  # compiled again: what one process does alone ended with a reset of Dynamo
    casts = weight_stats().casts
    run(batch(2))
    assert weight_stats().casts == casts, "weights are cast again though nobody wrote them"


CASES |= {f"ddp_in_buckets_by_{lower}": functools.partial(in_buckets, lower) for lower in ("aot_eager", "inductor")}


@case
def ddp_with_fp8():
    """What one process gives batch by batch; of all rows at once it takes other scales: within fp8's own noise."""
    fp8 = {"policy": "op linear=fp8"}
    run, _ = amp(model := Model(), **fp8)
    ddp = DistributedDataParallel(run)  # which averages while it lives
    loss_of(ddp(batch(0))).backward()
    found = gradients(model)
    near(found, alone(**fp8))
    assert error(found, alone()) > 1e-2
    one, exact, rows = Model(), Model().double(), torch.cat([batch(0, rank) for rank in range(2)])
    loss_of(amp(one, **fp8)[0](rows)).backward()
    exact(rows.double()).square().mean().backward()
    noise = error(gradients(one), gradients(exact))  # 0.032, and 0.026 between the two
    assert error(found, gradients(one)) < noise


@case
def no_grad_and_grad_in_one_step():
    """DDP raises in the next forward if it saw a parameter unused."""
    model = Model()
    run, _ = amp(DistributedDataParallel(model))
    for i in range(3):
        model.zero_grad()
        with torch.no_grad():
            target = run(batch(50 + i)).float()
        loss = loss_of(run(batch(i))) + 0 * target.sum()
        loss.backward()
    near(gradients(model), alone(batches=(2,)))


@case
def fsdp_with_its_own_policy():
    """FSDP hands out bfloat16 weights and reduces in float32: nothing is left for us to cast."""
    model, policy = Model(), MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        part.forward = amp(part.forward)[0] if part is not model else part.forward
        fully_shard(part, mp_policy=policy)
    trains(torch.autocast("cpu", LOW)(model), model, tolerance=0.02)


@case
def ddp_of_checkpoints():
    make = functools.partial(Model, checkpointed, tied=True)
    trains(amp(DistributedDataParallel(model := make()))[0], model, make=make)


@case
def fsdp_of_selective_checkpoints():
    make = functools.partial(Model, selectively, tied=True)
    model = make()
    model.forward = amp(model.forward)[0]
    trains(fully_shard(model), model, make=make)


if __name__ == "__main__":
    run_cases(CASES)
