"""Run by test_decide.py: FSDP2 with 16-bit gathers, beside eager autocast on whole weights."""

import copy
import functools
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile import GradScaler, Policy, ShardingError, shard_policy
from tests import models
from tests.compiling import LOW
from tests.ranks import run_cases

CASES = {}
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


class Block(models.Block):
    def __init__(self, width=16, inner=35):
        super().__init__(width, inner, nn.functional.gelu)
        nn.init.normal_(self.norm.weight, 1.0, 0.1)


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


def batch(i, rank=None, rows=6):
    g = torch.Generator().manual_seed(100 + 7 * i + (dist.get_rank() if rank is None else rank))
    return torch.randn(rows, 16, generator=g)


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


def compile_(f, low=LOW, lower="aot_eager", policy="default"):
    options = {"dtype": low, "lower": lower, "products": "torch", "policy": policy}
    return torch.compile(f, backend="amp", options=options)


def compile_blocks(model, *options):
    for each in (*model.blocks, model.head):
        each.forward = compile_(each.forward, *options)
    return model


def sharded(model, how="by_block", lower="aot_eager", low=LOW, policy="default", **options):
    if how == "by_block":
        compile_blocks(model, low, lower, policy)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return compile_(model, low, lower, policy) if how == "whole" else model


def train(run, model, steps, accumulated=1, low=LOW, after=lambda i: None, forget=False):
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
        if forget:
            del loss
        optimizer.step()
        sizes.append(sum(gathered))
        after(i)
    return losses, sizes


def same(found, wanted):
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), f"{i}: {(ours - theirs).abs().max():.2e} apart"


def bytes_of_a_step(records, model, ranks=2, keep=False, accumulated=1):
    """What each rank sends: its padded shard, for blocks twice in each forward and backward unless kept, else once."""
    total = 0
    sizes = {record.weight: 4 if record.gathered_as == "f32" else 2 for record in records}
    for name, p in model.named_parameters():
        shard = -(-len(p) // ranks) * p[0].numel() * sizes[name]
        total += shard * accumulated * (2 if name.startswith("blocks") and not keep else 1)
    return total


def narrow(records):
    return {record.weight for record in records if record.gathered_as != "f32"}


def check(how="by_block", lower="aot_eager", steps=4, accumulated=1, low=LOW, make=Model, ask_after=0, **options):
    """Trains with 16-bit gathers of all but the norms; the numbers are eager autocast's. Returns the model."""
    model = make()
    run = sharded(model, how, lower, low, **options)
    decided = []

    def ask(step):
        if step == ask_after:
            decided.append(shard_policy(model, low))

    ask(0)
    losses, sizes = train(run, model, steps, accumulated, low, lambda i: ask(i + 1), lower == "eager")
    found, wanted = losses + [full(p) for p in model.parameters()], expected(make(), steps, accumulated, low)
    if lower == "inductor":
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    else:
        same(found, wanted)
    records, whole = decided[0].records(), Model()
    assert narrow(records) == {r.weight for r in records if "norm" not in r.weight}, str(decided[0])
    keep = options.get("reshard_after_forward") is False
    assert sizes[-1] == bytes_of_a_step(records, whole, keep=keep, accumulated=accumulated), (sizes, records)
    first = bytes_of_a_step([r._replace(gathered_as="f32") for r in records], whole, keep=keep)
    assert sizes[0] == first or accumulated > 1, (sizes, first)
    assert decided[0].bytes_saved == sum(p.numel() * 2 for n, p in whole.named_parameters() if "norm" not in n)
    return model, run


def ways(check):
    """The cases of what checks a training in one of the usual ways."""
    return {
        "by_block": check,
        "whole": functools.partial(check, "whole"),
        "through_inductor": functools.partial(check, lower="inductor"),
        "by_torchs_own_autograd": functools.partial(check, lower="eager"),
        "in_float16": functools.partial(check, low=torch.float16),
        "kept_until_backward": functools.partial(check, reshard_after_forward=False),
        "accumulated": functools.partial(check, accumulated=3),
    }


CASES |= ways(check) | {
    "asked_after_two_steps": functools.partial(check, steps=5, ask_after=2),
    "asked_after_a_step_of_the_whole": functools.partial(check, "whole", ask_after=1),
}


@case
def checkpointed_around_and_inside():
    check(make=functools.partial(Model, lambda block, x: checkpoint(block, x, use_reentrant=False)))

    class Inside(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def make():
        model = Model()
        for block in model.blocks:
            block.__class__ = Inside
        return model

    check(make=make)


@case
def prefetched():
    model = Model()
    run = sharded(model)
    shard_policy(model, LOW)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    losses, _ = train(run, model, 4)
    same(losses + [full(p) for p in model.parameters()], expected(Model(), 4))


def settled(make=Model, how="by_block", steps=2, policy=None, **options):
    """A model whose weights are gathered in 16 bits, and what tells so."""
    model = make()
    run = sharded(model, how, **options)
    decided = shard_policy(model, LOW, policy)
    train(run, model, steps)
    return model, run, decided


def copied(model):
    """A whole model with the weights of a sharded one."""
    plain = Model()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.data.copy_(full(ours))
    return plain


def agree(run, model, x):
    """One call has the result of eager autocast with the whole weights."""
    plain = copied(model)
    with torch.autocast("cpu", LOW), torch.no_grad():
        assert torch.equal(run(x), plain(x))
    model.reshard()


def same_gradients(model, run, make_loss):
    """One backward has the gradients of eager autocast with the whole weights, averaged over the ranks."""
    plain = copied(model)
    model.zero_grad()
    with torch.autocast("cpu", LOW):
        make_loss(run, model).backward()
        make_loss(plain, plain).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        assert torch.equal(full(ours.grad), theirs.grad / dist.get_world_size())


def refused(run, *words):
    """The rank gets an error that has these words."""
    try:
        run()
    except Exception as error:
        assert isinstance(error, ShardingError | torch._dynamo.exc.InternalTorchDynamoError), type(error)
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("nothing was raised")


def reshard(model):
    """What a forward left, in which a weight was refused."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@case
def written_shards_are_gathered_anew():
    model, run, decided = settled()
    first, folder = model.blocks[0].up, Path(sys.argv[1], "writers")
    states = {k: v.clone() for k, v in model.state_dict().items()}
    dcp.save({"m": states}, checkpoint_id=folder)
    writers = [
        lambda: None,
        lambda: first.weight.data.mul_(-1.5),
        lambda: first.weight.data.to_local().add_(0.25),
        lambda: first.weight._local_tensor.data.mul_(0.5),
        lambda: first.weight.to_local().mul_(3.0),
        lambda: first.weight.mul_(-1.0),
        lambda: torch._foreach_mul_([p.data for p in model.parameters()], 0.9),
        lambda: torch._foreach_lerp_(list(model.parameters()), list(states.values()), 0.5),
        lambda: model.load_state_dict(states),
        lambda: model.load_state_dict({k: v * 2 for k, v in states.items()}, assign=True),
        lambda: model._apply(lambda t: t * 0.75),
        lambda: model.double() and model.float(),
        lambda: dcp.load({"m": {k: v for k, v in model.state_dict().items()}}, checkpoint_id=folder),
        lambda: first.weight.to_local().numpy().fill(0.125),
    ]
    for write in writers:
        with torch.no_grad():
            write()
        gathered.clear()
        agree(run, model, batch(77))
        assert sum(gathered) == bytes_of_a_step(decided.records(), Model(), keep=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.autocast("cpu", LOW):
            loss_of(run(batch(1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        agree(run, model, batch(77))


@case
def shards_are_copied_and_pickled():
    model, _, _ = settled()
    model.zero_grad()
    same(map(full, copy.deepcopy([*model.parameters()])), map(full, model.parameters()))
    path = Path(sys.argv[1], f"shards{dist.get_rank()}")
    for saved, safely in ((model.state_dict(), True), (dict(model.named_parameters()), False)):
        torch.save(saved, path)
        same(map(full, torch.load(path, weights_only=safely).values()), map(full, model.parameters()))


class Training:
    """With a scaler whose scale grows every other step."""

    def __init__(self):
        self.model = Model()
        self.run, self.decided = sharded(self.model), shard_policy(self.model, LOW)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def go(self, steps):
        for i in steps:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", LOW):
                loss = loss_of(self.run(batch(i)))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self.bits()

    def bits(self):
        states = [full(value) for state in self.optimizer.state.values() for value in state.values()]
        return [*map(full, self.model.parameters()), *states, torch.tensor(self.scaler.get_scale())]

    def state(self):
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states, "scaler": self.scaler.state_dict()}


class Held(dcp.DefaultSavePlanner):
    """Plans, and so saves, no sooner than it may."""

    def __init__(self):
        super().__init__()
        self.may_save = threading.Event()

    def create_local_plan(self):
        assert self.may_save.wait(60)
        return super().create_local_plan()


@case
def saved_while_training_goes_on_and_resumed_by_a_new_model():
    """The group is the saving thread's own: two threads that share one mix up their collectives."""
    folder, held, group = Path(sys.argv[1], "resume"), Held(), dist.new_group(backend="gloo")
    first = Training()
    saved, state = first.go(range(3)), first.state()
    assert {v.dtype for v in state["model"].values()} == {torch.float32}
    writing = dcp.async_save(state, checkpoint_id=folder, process_group=group, planner=held)
    wanted = first.go(range(3, 7))
    assert not any(map(torch.equal, saved, wanted)), "all moves on, scale and steps too"
    held.may_save.set()
    writing.result()
    other = Training()
    state = other.state()
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.scaler.load_state_dict(state["scaler"])
    same(other.bits(), saved)
    same(other.go(range(3, 7)), wanted)
    assert len(narrow(other.decided.records())) == 10


@case
def initialized_on_meta():
    with torch.device("meta"):
        model = Model()
    run = sharded(model)
    decided = shard_policy(model, LOW)
    model.to_empty(device="cpu")
    set_model_state_dict(model, Model().state_dict(), options=StateDictOptions(full_state_dict=True))
    losses, _ = train(run, model, 4)
    same(losses + [full(p) for p in model.parameters()], expected(Model(), 4))
    assert len(narrow(decided.records())) == 10


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
    run = compile_(fully_shard(model))
    decided = shard_policy(model, LOW)
    losses, _ = train(run, model, 4)
    same(losses + [full(p) for p in model.parameters()], expected(Tied(), 4))
    assert narrow(decided.records()) == {"frozen.weight", "frozen.bias", "low_rank.weight"}, str(decided)


@case
def a_graph_that_reads_float32_later():
    model, run, decided = settled()
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
    losses, _ = train(model, model, 4)
    same(losses + [full(p) for p in model.parameters()], expected(Model(), 4))
    assert not any(name.startswith("blocks.1") for name in narrow(decided.records())), str(decided)
    assert len(narrow(decided.records())) == 6
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
    run = sharded(model)
    decided = shard_policy(model, LOW)
    losses, _ = train(run, model, 4)
    same(losses + [full(p) for p in model.parameters()], expected(make(), 4))
    assert "blocks.1.up.weight" not in narrow(decided.records()) and len(narrow(decided.records())) == 9, str(decided)
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
    model, run, _ = settled(reshard_after_forward=False)
    with torch.autocast("cpu", LOW):
        loss = loss_of(run(batch(0)))
    refused(lambda: loss + model.blocks[0].up.weight.pow(2).sum(), "blocks.0.up.weight")
    loss.backward()
    model.zero_grad()
    fresh = shard_policy(model, LOW, Policy(modules=(("blocks.*.up", "fp32"),)))

    def make_loss(run, model):
        return loss_of(run(batch(0))) + model.blocks[0].up.weight.pow(2).sum()

    for _ in range(3):
        same_gradients(model, run, make_loss)
    assert len(narrow(fresh.records())) == 6, str(fresh)


@case
def ranks_whose_programs_differ():
    """Rank 0 logs a norm after its first forward, rank 1's batches change their sizes: all stay in step."""
    model = Model()
    run = sharded(model)
    decided = shard_policy(model, LOW)
    for i in range(4):
        rank = dist.get_rank()
        x = batch(i) if rank == 0 or i < 2 else torch.cat([batch(i), batch(i + 1)])

        def make_loss(f, each, x=x, logs=rank == i == 0):
            loss = loss_of(f(x))
            return loss + 0 * each.head.weight.norm().item() if logs else loss

        same_gradients(model, run, make_loss)
    assert len(narrow(decided.records())) == 9
    (because,) = (record.because for record in decided.records() if record.weight == "head.weight")
    assert because.startswith("in the first forward, some rank" if dist.get_rank() else "read in torch.float32 by norm")


@case
def two_forwards_before_their_backwards():
    """What the first has saved is there for its backward, however the second gathers."""
    model, plain = Model(), Model()
    decided, plain_run = None, sharded(plain)
    run = sharded(model)
    for before, between, after in ((LOW, None, 10), (None, torch.float32, 0), (LOW, None, 10)):
        decided = shard_policy(model, before) if before else decided
        for each, f in ((model, run), (plain, plain_run)):
            each.zero_grad()
            with torch.autocast("cpu", LOW):
                first = loss_of(f(batch(0)))
                if each is model and between:
                    shard_policy(model, between)
                second = loss_of(f(batch(1)))
            first.backward()
            (3 * second).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and torch.equal(full(ours.grad), full(theirs.grad))
        assert len(narrow(decided.records())) == after, str(decided)


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
    losses, _ = train(run, model, 2)
    same(losses + [full(p) for p in model.parameters()], expected(Model(), 2))
    assert len(narrow(decided.records())) == 10


@case
def back_to_float32():
    model, run, decided = settled()
    _, sizes = train(run, model, 1)
    shard_policy(model, torch.float32)
    assert not narrow(decided.records()) and "dtype=torch.float32" in str(decided)
    shards = full(model.norm.weight), full(model.head.weight)
    model.unshard()
    same((model.norm.weight.detach(), model.head.weight.detach()), shards)
    model.reshard()
    agree(run, model, batch(3))
    shard_policy(model, LOW)
    _, again = train(run, model, 3)
    assert "head.weight" not in narrow(decided.records()) and len(narrow(decided.records())) == 9, "read just now"
    assert again[0] > again[1] == again[2] == bytes_of_a_step(decided.records(), Model()) > sizes[0]


@case
def told():
    refused(lambda: shard_policy(nn.Linear(2, 2)), "found no FSDP2 module in Linear")
    model, run, decided = settled(how="whole")
    refused(lambda: shard_policy(model, torch.float64), "float64", "expected torch.bfloat16")
    with torch.autocast("cpu", LOW):
        report = ampcompile.explain(run)(batch(0))
    assert list(report.gathers) == decided.records()
    assert "blocks.0.up.weight" in str(report) and "gathered as" in str(report)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    other = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(param_dtype=LOW))
    assert {record.because for record in shard_policy(other).records()} == {"FSDP's own MixedPrecisionPolicy decides"}
    other(batch(0).bfloat16())


@case
def watched():
    """A watched graph computes its magnitudes beside 16-bit gathers, and changes no number."""
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    options = {"dtype": LOW, "lower": "aot_eager", "products": "torch", "watch": True}
    run, decided = torch.compile(model, backend="amp", options=options), shard_policy(model, LOW)
    losses, _ = train(run, model, 4)
    same(losses + [full(p) for p in model.parameters()], expected(Model(), 4))
    assert len(narrow(decided.records())) == 10, str(decided)
    assert ampcompile.watch(run).report().first is None


if __name__ == "__main__":
    run_cases(CASES)
