"""The model that distributed_ranks.py trains, its batches, and what one process alone computes on them."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as checkpointing

from tests.compiling import compiled, error
from tests.models import Block

ROWS = 4


def amp(f, **options):
    """Products are torch's own, as in the parts that run eagerly: on some CPUs amp's round a few numbers otherwise."""
    return compiled(f, **{"products": "torch", **options})


class Model(nn.Module):
    """Two blocks; `keep` says how their activations are kept; they share a weight if `tied`."""

    def __init__(self, keep=None, tied=False, inner=32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(16, inner, nn.functional.gelu) for _ in range(2))
        self.head, self.keep = nn.Linear(16, 3), keep
        if tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.keep is None else self.keep(block, x)
        return self.head(x)


def checkpointed(block, x):
    return checkpointing.checkpoint(block, x, use_reentrant=False)


def selectively(block, x):
    """Products are kept, the rest is computed again."""

    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = functools.partial(checkpointing.create_selective_checkpoint_contexts, kept)
    return checkpointing.checkpoint(block, x, use_reentrant=False, context_fn=context)


def batch(i, rank=None):
    torch.manual_seed(100 * i + (dist.get_rank() if rank is None else rank))
    return torch.randn(ROWS, 16)


def loss_of(outputs):
    return outputs.float().square().mean()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(module):
    return [full(p.grad).clone() for p in module.parameters()]


@functools.cache
def alone(make=Model, batches=(0,), **options):
    """The gradients that one process computes on the batches of all ranks."""
    run, _ = amp(model := make(), **options)
    for i in batches:
        for rank in range(dist.get_world_size()):
            (loss_of(run(batch(i, rank))) / dist.get_world_size()).backward()
    torch._dynamo.reset()
    return [p.grad for p in model.parameters()]


def same(found, expected, tolerance=1e-5):
    distance = error(found, expected)
    assert distance < tolerance, f"gradients are {distance:.2e} apart"
