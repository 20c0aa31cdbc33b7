"""Run by test_distributed.py: what each rank does, case by case; rank 0 writes what came out as JSON."""

import functools
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ampcompile import GradScaler, weight_stats
from tests.compiling import LOW, error
from tests.distributed_model import Model, alone, amp, batch, checkpointed, full, gradients, loss_of, same, selectively
from tests.ranks import run_cases

CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def autocast(f, dtype=LOW):
    return torch.autocast("cpu", dtype)(f)


def trains(run, module, tolerance=1e-5, make=Model):
    loss_of(run(batch(0))).backward()
    same(gradients(module), alone(make), tolerance)


@case
def ddp_around_the_compiled_model():
    run, recorder = amp(Model())
    ddp = DistributedDataParallel(run)
    trains(ddp, ddp.module)
    assert recorder.graphs


def _in_buckets(lower):
    """Dynamo splits the graph where DDP's buckets end; the backend gets fake inputs."""
    wide = functools.partial(Model, inner=8192)  # a megabyte each, the smallest first bucket
    model = wide()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    run, recorder = amp(ddp, lower=lower)
    trains(run, model, 1e-5 if lower == "aot_eager" else 1e-2, wide)
    assert len(recorder.graphs) > 1, "not split"
    run(batch(1))  # compiled again: what one process does alone ended with a reset of Dynamo
    casts = weight_stats().casts
    run(batch(2))
    assert weight_stats().casts == casts, "weights are cast again though nobody wrote them"


for _lower in ("aot_eager", "inductor"):
    CASES[f"compiled_ddp_in_buckets_by_{_lower}"] = functools.partial(_in_buckets, _lower)


@case
def ddp_with_fp8():
    """What one process gives batch by batch; of all rows at once it takes other scales: within fp8's own noise."""
    fp8 = {"policy": "op linear=fp8"}
    run, _ = amp(model := Model(), **fp8)
    ddp = DistributedDataParallel(run)
    loss_of(ddp(batch(0))).backward()
    found = gradients(model)
    same(found, alone(**fp8))
    assert error(found, alone()) > 1e-2
    one, exact, rows = Model(), Model().double(), torch.cat([batch(0, rank) for rank in range(2)])
    loss_of(amp(one, **fp8)[0](rows)).backward()
    loss_of(exact(rows.double())).backward()
    noise = error(gradients(one), gradients(exact))  # 0.032, and 0.026 between the two
    assert error(found, gradients(one)) < noise


@case
def accumulation_without_sync():
    model = Model()
    run, _ = amp(ddp := DistributedDataParallel(model))
    for i in range(2):
        with ddp.no_sync():
            loss_of(run(batch(i))).backward()
    loss_of(run(batch(2))).backward()
    same(gradients(model), alone(batches=(0, 1, 2)))


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
    same(gradients(model), alone(batches=(2,)))


@case
def regional_compilation():
    model = Model()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = amp(block)[0]
    ddp = DistributedDataParallel(model)
    loss_of(autocast(ddp)(batch(0))).backward()
    same(gradients(model), alone())


def sharded(policy=None, **options):
    """The usual way: blocks are compiled, then sharded, then the whole."""
    model, options_of = Model(), {"mp_policy": policy} if policy else {}
    for i, block in enumerate(model.blocks):
        block.forward = amp(block.forward, **options)[0]
        fully_shard(model.blocks[i], **options_of)
    return fully_shard(model, **options_of)


@case
def fsdp_without_a_policy():
    model = sharded()
    for _ in range(2):  # sharded again in between
        model.zero_grad()
        trains(autocast(model), model)


@case
def fsdp_with_its_own_policy():
    """FSDP hands out bfloat16 weights and reduces in float32: nothing is left for us to cast."""
    model = sharded(policy=MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32))
    trains(autocast(model), model, tolerance=0.02)


@case
def fsdp_weights_are_never_stale():
    model, reference = sharded(), Model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for i in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(autocast(model)(batch(i))).backward()
        for rank in range(dist.get_world_size()):
            (loss_of(autocast(reference)(batch(i, rank))) / dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.detach()), expected.detach(), rtol=2e-2, atol=2e-3)


def _checkpointing(keep, wrap):
    make = functools.partial(Model, keep=keep, tied=True)
    model = make()
    if wrap == "ddp":
        run, _ = amp(DistributedDataParallel(model))
    else:
        model.forward = amp(model.forward)[0]
        run = fully_shard(model)
    trains(run, model, make=make)


for _keep, _wrap in ((checkpointed, "ddp"), (selectively, "fsdp")):
    CASES[f"{_keep.__name__}_{_wrap}"] = functools.partial(_checkpointing, _keep, _wrap)


@case
def a_checkpoint_moves_between_world_sizes():
    """Two ranks train and save; test_distributed.py has one process load it."""
    model = sharded()
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(autocast(model)(batch(i)))).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": get_model_state_dict(model), "scaler": scaler.state_dict()}
    dcp.save(state, checkpoint_id=Path(sys.argv[1], "checkpoint"))
    with torch.no_grad():
        outputs = autocast(model)(batch(0, rank=0)).float()
    if dist.get_rank() == 0:
        torch.save(outputs, Path(sys.argv[1], "checkpoint", "outputs.pt"))


def load(folder):
    """One process, not sharded, goes on from the checkpoint of two."""
    model, scaler = Model(), GradScaler("cpu")
    run, _ = amp(model)
    before = run(batch(0, rank=0)).float()  # copies of the weights exist by now
    state = {"model": get_model_state_dict(model), "scaler": scaler.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, state["model"])
    scaler.load_state_dict(state["scaler"])
    outputs = run(batch(0, rank=0)).float()
    expected = torch.load(Path(folder, "outputs.pt"))
    torch.testing.assert_close(outputs.detach(), expected, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(outputs, before, atol=1e-2), "the checkpoint changes nothing"
    assert scaler.get_scale() == 2.0**9


if __name__ == "__main__":
    run_cases(CASES)
