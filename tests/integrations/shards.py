"""Run by test_accelerate.py: Accelerate's FSDP2 on two processes, with 16-bit gathers and eagerly under its autocast.

Accelerate shards on accelerators alone; on CPUs it drops the plugin without a word. So its state is told afterwards.
"""

import os
import warnings

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

import ampcompile
from ampcompile.integrations.accelerate import AmpPlugin
from tests.ranks import join, leave
from tests.sharding.gathers import Model, batch, bytes_of_a_step, full, gathered, gathered_as, loss_of, narrow, same


def train(**plugins):
    """Losses and weights, what the last step gathered, and the model."""
    AcceleratorState._reset_state(True)
    shards = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        mixed_precision_policy=MixedPrecisionPolicy(),
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=shards, **plugins)
    assert not accelerator.is_fsdp2, "then telling its state isn't needed any more"
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, shards
    shards.set_mixed_precision("bf16")
    assert shards.mixed_precision_policy.param_dtype is None, "the given policy stays"
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    decided = ampcompile.shard_policy(model, torch.bfloat16) if plugins else None
    losses = []
    for step in range(4):
        gathered.clear()
        with accelerator.autocast():
            losses.append(loss_of(model(batch(step))))
        accelerator.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return losses + [full(p) for p in model.parameters()], sum(gathered), decided


def main():
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    warnings.filterwarnings("ignore", "Linear.compile|LayerNorm.compile", ampcompile.AmpWarning)
    join()
    wanted, wide, _ = train()
    options = {"lower": "aot_eager", "products": "torch"}
    found, low, decided = train(dynamo_plugin=AmpPlugin(options=options, use_regional_compilation=True))
    same(found, wanted)
    assert narrow(decided.records()) == {r.weight for r in decided.records() if "norm" not in r.weight}, str(decided)
    assert (low, wide) == (bytes_of_a_step(gathered_as(decided), Model()), 9960)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
