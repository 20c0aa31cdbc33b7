"""Run by test_ranks.py: FSDP2 with 16-bit gathers, beside eager autocast on whole weights."""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ampcompile import Policy, UnsupportedError, shard_policy
from tests.compiling import HALF, LOW
from tests.ranks import run_cases
from tests.sharding.gathers import (
    Bits,
    Block,
    Model,
    batch,
    bytes_of_a_step,
    cases_of,
    compile_,
    full,
    gathered_as,
    loss_of,
    narrow,
    same,
    sharded,
    train,
)

SIXTEEN = Bits("default", 35)
CASES = cases_of(SIXTEEN)


def case(f):
    CASES[f.__name__] = f
    return f


def refused(run, *words):
    """The rank gets an error that has these words."""
    try:
        run()
    except Exception as error:
        assert isinstance(error, UnsupportedError | torch._dynamo.exc.InternalTorchDynamoError), type(error)
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("nothing was raised")


def reshard(model):
    """What a forward left, in which a weight was refused."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@case
def shards_are_copied_and_pickled():
    model, _, _ = SIXTEEN.settled()
    model.zero_grad()
    same(map(full, copy.deepcopy([*model.parameters()])), map(full, model.parameters()))
    path = Path(sys.argv[1], f"shards{dist.get_rank()}")
    for saved, safely in ((model.state_dict(), True), (dict(model.named_parameters()), False)):
        torch.save(saved, path)
        same(map(full, torch.load(path, weights_only=safely).values()), map(full, model.parameters()))


class Tied(nn.Module):
    """An embedding, read in float32, whose weight the head reads too; a frozen layer with a trained one beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.frozen, self.low_rank, self.head = (
            nn.Embedding(10, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 10, bias=False),
        )
        self.frozen.requires_grad_(False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table((x[:, 0] * 3).long() % 10)
        return self.head(self.frozen(x) + self.low_rank(x))


@case
def tied_and_frozen():
    model = Tied()
    run, decided = compile_(fully_shard(model)), shard_policy(model, LOW)
    types = {"table.weight": "f32"} | dict.fromkeys(("frozen.weight", "frozen.bias", "low_rank.weight"), "bf16")
    SIXTEEN.trains(model, run, decided, make=Tied, types=types)


@case
def a_graph_that_reads_float32_later():
    model, run, decided = SIXTEEN.settled()
    narrowed = narrow(decided.records())
    x = batch(5)
    with torch.autocast("cpu", LOW), torch.no_grad():  # another graph, the same readers
        before = run(x)

    class Reader(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return x * self.block.up.weight.sum()

    reader = Reader(model.blocks[0])
    model.blocks[0].forward = torch.compile(lambda x: reader(x), backend="amp", options={"lower": "aot_eager"})
    with torch.autocast("cpu", LOW), torch.no_grad():
        refused(lambda: run(x), "blocks.0.up.weight", "bf16", "aten.sum in a compiled graph", "('blocks.0.up', 'fp32')")
    reshard(model)
    del model.blocks[0].forward
    assert narrow(decided.records()) == narrowed
    model.blocks[0].forward = compile_(model.blocks[0].forward)
    with torch.autocast("cpu", LOW), torch.no_grad():
        assert torch.equal(run(x), before)


@case
def another_backends_graph():
    model = Model()
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="aot_eager")
    fully_shard(model)
    for block in (model.blocks[0], model.head):
        block.forward = compile_(block.forward)
    decided = shard_policy(model, LOW)
    types = SIXTEEN.types(Model())
    SIXTEEN.trains(model, model, decided, types=types | {n: "f32" for n in types if n.startswith("blocks.1")})
    shard_policy(model, LOW)
    train(model, model, range(3))
    assert {n for n in types if n.startswith("blocks.1")}.isdisjoint(narrow(decided.records())), (
        "as its graph tells once"
    )
    model.blocks[0].forward = torch.compile(Block.forward.__get__(model.blocks[0]), backend="aot_eager")
    with torch.autocast("cpu", LOW), torch.no_grad():
        refused(lambda: model(batch(0)), "another backend")
    reshard(model)


@case
def an_eager_reader():
    """One that is there from the start keeps its weight in float32; a later one is refused."""

    def forward(self, x):
        x = Block.forward(self, x)
        torch._dynamo.graph_break()
        return x + self.up.weight.pow(2).sum()

    def make():
        model = Model()
        model.blocks[1].forward = forward.__get__(model.blocks[1])
        return model

    model = make()
    run, decided = SIXTEEN.sharded(model)
    SIXTEEN.trains(model, run, decided, make=make, types=SIXTEEN.types(Model()) | {"blocks.1.up.weight": "f32"})
    norm = sum(p.pow(2).sum() for p in model.parameters())  # of shards: float32, as they are
    whole = sum(full(p).pow(2).sum() for p in model.parameters())
    torch.testing.assert_close(full(norm), whole)
    model.unshard()
    refused(lambda: model.head.weight.pow(2).sum(), "head.weight", "pow in eager code", "('head', 'fp32')")
    refused(lambda: torch.cat([model.head.weight, model.head.weight]), "cat in eager code")
    refused(lambda: model.head.weight.data, "data in eager code")
    assert model.head.weight.dtype == torch.float32 and model.head.weight.shape == (3, 16)
    model.norm.weight.sum()  # float32, and there
    model.reshard()


@case
def an_eager_regulariser_between_forward_and_backward():
    model, run, _ = SIXTEEN.settled(reshard_after_forward=False)
    with torch.autocast("cpu", LOW):
        loss = loss_of(run(batch(0)))
    refused(lambda: loss + model.blocks[0].up.weight.pow(2).sum(), "blocks.0.up.weight")
    loss.backward()
    model.zero_grad()
    fresh = shard_policy(model, LOW, Policy(modules=(("blocks.*.up", "fp32"),)))

    def make_loss(run, model):
        return loss_of(run(batch(0))) + model.blocks[0].up.weight.pow(2).sum()

    for _ in range(3):
        SIXTEEN.agree(model, run, make_loss=make_loss)
    assert len(narrow(fresh.records())) == 6, str(fresh)


@case
def ranks_whose_programs_differ():
    """Rank 0 logs a norm after its first forward, rank 1's batches change their sizes: all stay in step."""
    model = Model()
    run, decided = SIXTEEN.sharded(model)
    for i in range(4):
        rank = dist.get_rank()
        x = batch(i) if rank == 0 or i < 2 else torch.cat([batch(i), batch(i + 1)])

        def make_loss(f, each, x=x, logs=rank == i == 0):
            loss = loss_of(f(x))
            return loss + 0 * each.head.weight.norm().item() if logs else loss

        SIXTEEN.agree(model, run, make_loss=make_loss)
    assert len(narrow(decided.records())) == 9
    (because,) = (record.because for record in decided.records() if record.weight == "head.weight")
    assert because.startswith("in the first forward, some rank" if dist.get_rank() else "read in torch.float32 by norm")


@case
def trained_after_an_inference():
    """A root keeps its own weights after each forward, where no backward follows."""
    model = Model()
    run = sharded(model)
    decided = shard_policy(model)
    for i in range(2):
        with torch.autocast("cpu", LOW), torch.inference_mode():
            assert torch.equal(run(batch(i)), Model()(batch(i)))
    model.reshard()
    SIXTEEN.trains(model, run, decided, steps=2)


@case
def back_to_float32():
    model, run, decided = SIXTEEN.settled()
    _, sizes = train(run, model, range(1))
    shard_policy(model, torch.float32)
    assert not narrow(decided.records()) and "dtype=torch.float32" in str(decided)
    shards = full(model.norm.weight), full(model.head.weight)
    model.unshard()
    same((model.norm.weight.detach(), model.head.weight.detach()), shards)
    model.reshard()
    SIXTEEN.agree(model, run)
    shard_policy(model, LOW)
    _, again = train(run, model, range(3))
    assert gathered_as(decided) == SIXTEEN.types(Model()), "what was read before the policy doesn't count"
    assert again[0] > again[1] == again[2] == bytes_of_a_step(gathered_as(decided), Model()) == sizes[0]


@case
def decided_anew_in_another_type():
    """Readers of before are forgotten; a backward that saved numbers of before gets them."""
    model = Model()
    run, decided = SIXTEEN.sharded(model, None)
    train(run, model, range(3))
    gradients = []
    for anew in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", LOW):
            loss = loss_of(run(batch(0)))
        if anew:
            shard_policy(model, HALF)
            with torch.autocast("cpu", HALF), torch.no_grad():
                for _ in range(3):
                    run(batch(1))
            assert not narrow(decided.records())
        loss.backward()
        gradients.append([full(p.grad) for p in model.parameters()])
    same(*gradients)
    del loss
    model.reshard()
    shard_policy(model, HALF)
    model.unshard()
    model.head.bias.sum()
    train(run, model, range(3), low=HALF)
    types = SIXTEEN.types(Model(), HALF)
    assert gathered_as(decided) == types | {"head.bias": "f32"}, str(decided)
    shard_policy(model, HALF)
    train(run, model, range(3), low=HALF)
    assert gathered_as(decided) == types, str(decided)


@case
def told():
    refused(lambda: shard_policy(nn.Linear(2, 2)), "found no FSDP2 module in Linear")
    model, _, _ = SIXTEEN.settled(steps=0)
    refused(lambda: shard_policy(model, torch.float64), "float64", "expected torch.bfloat16")
    other = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(param_dtype=LOW))
    assert {record.because for record in shard_policy(other).records()} == {"FSDP's own MixedPrecisionPolicy decides"}
    other(batch(0).bfloat16())


if __name__ == "__main__":
    run_cases(CASES)
