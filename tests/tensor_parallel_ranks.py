"""Run by test_tensor_parallel.py: models of DTensor weights, beside eager autocast; each rank compares its own bits."""

import contextlib
import functools
import itertools
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.compiling import LOW, error, same_bits
from tests.ranks import join, leave


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)


COLUMN_AND_ROW = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


def parallel(plan, mesh):
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def sharded_twice(plan, mesh):
    model = parallel(plan, mesh["model"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def whole(model, **options):
    return torch.compile(model, backend="amp", options=options)


def by_block(model, **options):
    for block in model.blocks:
        block.compile(backend="amp", options=options)
    return model


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step(model, f, x, region):
    """The result in float32, and gradients: what this rank has of them. The weights are updated."""
    x = x.clone().requires_grad_()
    with region:
        result = local(f(x)).float()
    result.square().sum().backward()
    found = [result, x.grad, *(local(p.grad).clone() for p in model.parameters())]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return found


def compare(make, compile_it, x, lower):
    """Two steps in a row give eager autocast's bits, those of Inductor's kernels nearly."""
    torch._dynamo.reset()
    theirs, ours = make(), make()
    f = compile_it(ours, lower=lower)
    for _ in range(2):
        eager, ambient = (torch.autocast("cpu", LOW, cache_enabled=False) for _ in range(2))
        expected = step(theirs, theirs, x, eager)
        found = step(ours, f, x, ambient if compile_it is by_block else contextlib.nullcontext())
        assert error(found, expected) < 1e-2 if lower == "inductor" else same_bits(found, expected)


class Embedded(nn.Module):
    """The embedding's result arrives at the block before it is there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.block = nn.Embedding(20, 16), Block()

    def forward(self, tokens):
        return self.block(self.table(tokens))


def compare_after_an_embedding(mesh, lower):
    """The graph runs eagerly, since the embedding's gradient would be another; after a copy it needn't."""
    tokens, found = torch.arange(16) % 20, []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model = Embedded()
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        parallelize_module(model, mesh, {"table": rows})
        parallelize_module(model.block, mesh, SEQUENCE)
        if compile_it:
            model.block.compile(backend="amp", options={"lower": lower})
        with warnings.catch_warnings(record=True) as told, torch.autocast("cpu", LOW, cache_enabled=False):
            result = local(model(tokens)).float()
        assert any("x.clone()" in str(warning.message) for warning in told) == (compile_it and lower != "eager"), told
        result.square().sum().backward()
        found.append([result, *(local(p.grad) for p in model.parameters())])
    assert same_bits(*found)


def compare_loss_parallel(mesh, lower):
    """Logits sharded by class, and their loss; sharded before the model is compiled, and after a first call of it."""
    x, targets = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 16
    plan = {"up": ColwiseParallel(), "down": ColwiseParallel(input_layouts=Shard(-1), use_local_output=False)}
    found = []
    for ours, late in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = f = Block()
        if late:
            model.compile(backend="amp", options={"lower": lower})
            with torch.no_grad():
                model(x)
        parallelize_module(model, mesh, plan)
        if ours and not late:
            model.compile(backend="amp", options={"lower": lower})
        with torch.autocast("cpu", LOW, cache_enabled=False):
            logits = f(x)
        with loss_parallel():
            loss = nn.functional.cross_entropy(logits.float(), targets)
            loss.backward()
        found.append([local(logits).float(), local(loss), *(local(p.grad) for p in model.parameters())])
    assert all(same_bits(found[0], each) for each in found[1:])


def main():
    """The arguments are the lowers."""
    join()
    size = dist.get_world_size()
    sizes, names, make = (
        ((size,), ("model",), parallel) if size == 2 else ((2, size // 2), ("data", "model"), sharded_twice)
    )
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    failed = False
    for plan, compile_it, lower in itertools.product((COLUMN_AND_ROW, SEQUENCE), (whole, by_block), sys.argv[1:]):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        if plan is SEQUENCE:
            x = x.chunk(mesh["model"].size())[mesh["model"].get_local_rank()]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
                compare(functools.partial(make, plan, mesh), compile_it, x, lower)
        except Exception:
            failed = True
            print(compile_it.__name__, lower, list(plan), traceback.format_exc())
        dist.barrier()
    if size == 2:
        for lower in sys.argv[1:]:
            compare_after_an_embedding(mesh, lower)
        compare_loss_parallel(mesh, "aot_eager")
    if failed:
        os._exit(1)
    leave()


if __name__ == "__main__":
    main()
