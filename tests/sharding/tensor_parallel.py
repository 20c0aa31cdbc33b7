"""Run by test_ranks.py: models of DTensor weights, beside eager autocast; each rank compares its own bits."""

import contextlib
import functools
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
from tests.models import Net
from tests.pairs import pairs
from tests.ranks import run_cases


def block():
    parts = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}
    return Net(lambda m, x: m.down(nn.functional.gelu(m.up(m.norm(x)))), **parts)


COLUMN_AND_ROW = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}
PLANS = {"columns and rows": COLUMN_AND_ROW, "sequence": SEQUENCE}


@functools.cache
def ranks_by_use():
    """Of two a row; of four two rows, along which weights are sharded once more."""
    two = dist.get_world_size() == 2
    return init_device_mesh("cpu", (2,) if two else (2, 2), mesh_dim_names=("model",) if two else ("data", "model"))


def parallel(plan, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    for each in model:
        parallelize_module(each, mesh, plan)
    return model


def sharded_twice(plan, mesh):
    model = parallel(plan, mesh["model"])
    for each in model:
        fully_shard(each, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def whole(model, **options):
    return torch.compile(model, backend="amp", options=options)


def by_block(model, **options):
    for each in model:
        each.compile(backend="amp", options=options)
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


def compare_after_an_embedding(lower):
    """The embedding's result arrives at the block before it is there: the graph runs eagerly, since the embedding's
    gradient would be another; after a copy it needn't.
    """
    tokens, found = torch.arange(16) % 20, []
    for compile_it in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(lambda m, tokens: m.block(m.table(tokens)), table=nn.Embedding(20, 16), block=block())
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        parallelize_module(model, ranks_by_use(), {"table": rows})
        parallelize_module(model.block, ranks_by_use(), SEQUENCE)
        if compile_it:
            model.block.compile(backend="amp", options={"lower": lower})
        with warnings.catch_warnings(record=True) as told, torch.autocast("cpu", LOW, cache_enabled=False):
            result = local(model(tokens)).float()
        assert any("x.clone()" in str(warning.message) for warning in told) == (compile_it and lower != "eager"), told
        result.square().sum().backward()
        found.append([result, *(local(p.grad) for p in model.parameters())])
    assert same_bits(*found)


def compare_loss_parallel(lower):
    """Logits sharded by class, and their loss; sharded before the model is compiled, and after a first call of it."""
    x, targets = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 16
    plan = {"up": ColwiseParallel(), "down": ColwiseParallel(input_layouts=Shard(-1), use_local_output=False)}
    found = []
    for ours, late in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = block()
        if late:
            model.compile(backend="amp", options={"lower": lower})
            with torch.no_grad():
                model(x)
        parallelize_module(model, ranks_by_use(), plan)
        if ours and not late:
            model.compile(backend="amp", options={"lower": lower})
        with torch.autocast("cpu", LOW, cache_enabled=False):
            logits = model(x)
        with loss_parallel():
            loss = nn.functional.cross_entropy(logits.float(), targets)
            loss.backward()
        found.append([local(logits).float(), local(loss), *(local(p.grad) for p in model.parameters())])
    assert all(same_bits(found[0], each) for each in found[1:])


def compare_model(plan, compile_it, lower):
    mesh = ranks_by_use()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    if plan is SEQUENCE:
        x = x.chunk(2)[mesh["model"].get_local_rank()]
    compare(functools.partial(parallel if mesh.ndim == 1 else sharded_twice, plan, mesh), compile_it, x, lower)


def models(*lowers):
    """Plans, ways to compile and lowers, each two of which meet."""
    return {
        f"{plan} {compile_it.__name__} {lower}": functools.partial(compare_model, PLANS[plan], compile_it, lower)
        for plan, compile_it, lower in pairs([*PLANS], (whole, by_block), lowers)
    }


OF_TWO = models("eager", "inductor")
OF_TWO |= {
    f"embedding {lower}": functools.partial(compare_after_an_embedding, lower) for lower in ("eager", "inductor")
}
OF_TWO["loss_parallel"] = functools.partial(compare_loss_parallel, "aot_eager")
OF_FOUR = models("aot_eager")

if __name__ == "__main__":
    run_cases(OF_TWO | OF_FOUR, OF_FOUR)
