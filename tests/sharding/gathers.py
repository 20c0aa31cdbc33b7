"""FSDP2 with gathers of fewer bits, beside the same model whole on each rank: what ranks.py (16 bits) and eight_bits.py
train, how they compare it, and `cases_of`, the cases that both run.
"""

import functools
import math
import sys
import threading
from dataclasses import dataclass
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile import GradScaler, shard_policy
from ampcompile.dtypes import short_name
from tests import models
from tests.compiling import LOW
from tests.sharding.paper import shard

SIZES = {"f32": 4, "bf16": 2, "f16": 2, "f8": 1}
gathered = []


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


class Inside(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def called(block, x):
    return block(x)


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


class Model(nn.Module):
    """Sizes that two ranks can't halve, and a head of 3, which no product in fp8 has; `through` calls the blocks."""

    def __init__(self, through=called, make_block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([make_block(), make_block()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)
        self.through = through

    def forward(self, x):
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))


def batch(i, rank=None, rows=16):
    g = torch.Generator().manual_seed(100 + 7 * i + (dist.get_rank() if rank is None else rank))
    return torch.randn(rows, 16, generator=g)


def loss_of(outputs):
    return outputs.float().square().mean()


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def averaged(gradient):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def compile_(f, low=LOW, lower="aot_eager", policy="default", **more):
    options = {"dtype": low, "lower": lower, "products": "torch", "policy": policy, **more}
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


def whole(model, how="by_block", lower="aot_eager", low=LOW, policy="default"):
    """What runs a model on one process: eager autocast, or where a policy quantizes the compiled one."""
    if policy == "default":
        return model
    return compile_(model, low, lower, policy) if how == "whole" else compile_blocks(model, low, lower, policy)


def train(
    run,
    model,
    steps,
    accumulated=1,
    low=LOW,
    is_whole=False,
    optimizer=None,
    scaler=None,
    overflows=None,
    after=lambda i: None,
):
    """Losses and weights, and the bytes that each step gathered; in step `overflows` those of rank 1 are infinite.

    `is_whole`: the gradients of all ranks are averaged by hand.
    """
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses, sizes = [], []
    for i in steps:
        optimizer.zero_grad()
        gathered.clear()
        for k in range(accumulated):
            if not is_whole:
                model.set_requires_gradient_sync(k == accumulated - 1)
            with torch.autocast("cpu", low):
                loss = loss_of(run(batch(10 * i + k)))
            scaler.scale(loss / accumulated * (math.inf if i == overflows and dist.get_rank() == 1 else 1)).backward()
        losses.append(loss.detach().clone())
        del loss
        for p in model.parameters() if is_whole else ():
            if p.grad is not None:
                p.grad = averaged(p.grad)
        scaler.step(optimizer)
        scaler.update()
        sizes.append(sum(gathered))
        after(i)
    return losses + [full(p) for p in model.parameters()], sizes


def same(found, wanted):
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), f"{i}: {(ours - theirs).abs().max():.2e} apart"


def gathered_as(decided):
    return {record.weight: record.gathered_as for record in decided.records()}


def narrow(records):
    return {record.weight for record in records if record.gathered_as != "f32"}


def bytes_of_a_step(types, model, keep=False, accumulated=1, over=None, twice=("blocks",)):
    """What each rank sends: its padded shard, for blocks twice in each forward and backward unless kept, else once."""
    numbers = {
        name: shard(p.shape, over or dist.get_world_size()) * (2 if name.startswith(twice) and not keep else 1)
        for name, p in model.named_parameters()
    }
    return sum(count * SIZES[types[name]] * accumulated for name, count in numbers.items())


@dataclass(frozen=True)
class Bits:
    """How many a weight is gathered in: what makes that so, and a block's width inside."""

    policy: str
    inner: int

    def make(self, through=called, block=Block):
        return Model(through, functools.partial(block, 16, self.inner))

    def types(self, model, low=LOW):
        """How each weight is gathered: norms in float32, a quantized product's in one byte, the rest in two."""
        found = dict.fromkeys((name for name, _ in model.named_parameters()), short_name(low))
        if self.policy != "default":
            found |= {n: "f8" for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}
        return found | {name: "f32" for name in found if "norm" in name}

    def sharded(self, model, low=LOW, **options):
        """What runs it, compiled by block, and what tells how it is gathered."""
        return sharded(model, low=low, policy=self.policy, **options), shard_policy(model, low)

    def settled(self, steps=2, make=None, **options):
        """A model whose weights are gathered in fewer bits, what runs it, and what tells so."""
        model = (make or self.make)()
        run, decided = self.sharded(model, **options)
        train(run, model, range(steps))
        return model, run, decided

    def expected(self, steps, make=None, how="by_block"):
        """Losses and weights of the model on one process."""
        model = (make or self.make)()
        return train(whole(model, how, policy=self.policy), model, range(steps), is_whole=True)[0]

    def trains(self, model, run, decided, steps=4, make=None, how="by_block", types=None):
        """Assert that it trains as on one process, and how it is gathered then."""
        found, _ = train(run, model, range(steps))
        same(found, self.expected(steps, make, how))
        assert gathered_as(decided) == (types or self.types((make or self.make)())), str(decided)

    def agree(self, model, run, plain=None, make_loss=None):
        """One step has the result and gradients of the model on one process (`plain`) with the same weights."""
        plain = plain or whole(self.make(), policy=self.policy)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.data.copy_(full(ours))
        found = []
        with torch.autocast("cpu", LOW):
            for each, f in ((model, run), (plain, plain)):
                each.zero_grad()
                found.append(make_loss(f, each) if make_loss else f(batch(77)))
            assert torch.equal(*found)
            for outputs in found:
                loss_of(outputs).backward()
        wanted = [averaged(p.grad) for p in plain.parameters() if p.grad is not None]
        same([full(p.grad) for p in model.parameters() if p.grad is not None], wanted)


def check(
    bits,
    how="by_block",
    lower="aot_eager",
    steps=4,
    accumulated=1,
    low=LOW,
    make=None,
    policy=None,
    ask_after=0,
    **options,
):
    """Trains with narrow gathers; the numbers are the whole model's, and as many bytes are gathered as there should be.

    More than two ranks' gradients are added up in FSDP's order: the numbers are those of its gathers in float32.
    """
    make, policy, asked = make or bits.make, policy or bits.policy, []
    model = make()
    run = sharded(model, how, lower, low, policy, **options)

    def ask(step):
        if step == ask_after:
            asked.append(shard_policy(model, low))

    ask(0)
    found, sizes = train(run, model, range(steps), accumulated, low, after=lambda i: ask(i + 1))
    plain = make()
    two = dist.get_world_size() == 2
    reference = whole(plain, how, lower, low, policy) if two else sharded(plain, how, lower, low, policy, **options)
    wanted, _ = train(reference, plain, range(steps), accumulated, low, two)
    if lower == "inductor" and policy == "default":
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    else:
        same(found, wanted)
    (decided,), plain = asked, make()
    types = bits.types(plain, low)
    assert gathered_as(decided) == types, str(decided)
    keep = options.get("reshard_after_forward") is False
    over = options["mesh"].size(1) if "mesh" in options else None
    assert sizes[-1] == bytes_of_a_step(types, plain, keep, accumulated, over), (sizes, str(decided))
    first = bytes_of_a_step(dict.fromkeys(types, "f32"), plain, keep, 1, over)
    assert sizes[0] == first or accumulated > 1, (sizes, first)
    assert decided.bytes_saved == sum(p.numel() * (4 - SIZES[types[n]]) for n, p in plain.named_parameters())


def prefetched(bits):
    model = bits.make()
    run, decided = bits.sharded(model)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    bits.trains(model, run, decided)


def initialized_on_meta(bits):
    with torch.device("meta"):
        model = bits.make()
    run, decided = bits.sharded(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, bits.make().state_dict(), options=StateDictOptions(full_state_dict=True))
    bits.trains(model, run, decided)


def watched(bits):
    """A watched graph computes its magnitudes beside narrow gathers, and changes no number; a report tells of both."""
    model = bits.make()
    sharded(model, "", policy=bits.policy)
    run, decided = compile_(model, policy=bits.policy, watch=True), shard_policy(model, LOW)
    bits.trains(model, run, decided, how="whole")
    assert ampcompile.watch(run).report().first is None
    with torch.autocast("cpu", LOW):
        report = ampcompile.explain(run)(batch(0))
    assert list(report.gathers) == decided.records()
    assert "blocks.0.up.weight" in str(report) and "gathered as" in str(report)


def written_shards_are_gathered_anew(bits):
    """Also if written by one rank alone, and to numbers that a scale from before wouldn't hold."""
    model, run, decided = bits.settled()
    plain = whole(bits.make(), policy=bits.policy)
    first, rank, folder = model.blocks[0].up, dist.get_rank(), Path(sys.argv[1], f"writers{bits.inner}")
    states = {k: v.clone() for k, v in model.state_dict().items()}
    dcp.save({"m": states}, checkpoint_id=folder)
    writers = [
        lambda: None,
        lambda: first.weight.data.mul_(-100.0),
        lambda: first.weight.data.to_local().add_(0.25),
        lambda: first.weight._local_tensor.data.mul_(0.5),
        lambda: first.weight._local_tensor.data.add_(7.0) if rank == 1 else None,
        lambda: first.weight.to_local().mul_(1e-3) if rank == 0 else None,
        lambda: first.weight.mul_(-1.0),
        lambda: torch._foreach_mul_([p.data for p in model.parameters()], 0.9),
        lambda: torch._foreach_lerp_(list(model.parameters()), list(states.values()), 0.5),
        lambda: model.load_state_dict(states),
        lambda: model.load_state_dict({k: v * 20 for k, v in states.items()}, assign=True),
        lambda: model._apply(lambda t: t * 0.05),
        lambda: model.double() and model.float(),
        lambda: dcp.load({"m": {k: v for k, v in model.state_dict().items()}}, checkpoint_id=folder),
        lambda: first.weight.to_local().numpy().fill(300.0) if rank == 0 else None,
    ]
    for write in writers:
        with torch.no_grad():
            write()
        gathered.clear()
        bits.agree(model, run, plain)
        assert sum(gathered) == bytes_of_a_step(gathered_as(decided), bits.make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        optimizer.step()
        bits.agree(model, run, plain)


def two_forwards_before_their_backwards(bits):
    """And an evaluation between. What the first has saved is there for its backward, however the second gathers."""
    model, plain = bits.make(), bits.make()
    run, plain_run, decided = sharded(model, policy=bits.policy), sharded(plain, policy=bits.policy), None
    for before, between in ((LOW, None), (None, torch.float32), (LOW, None)):
        decided = shard_policy(model, before) if before else decided
        for each, f in ((model, run), (plain, plain_run)):
            each.zero_grad()
            with torch.autocast("cpu", LOW):
                first = loss_of(f(batch(0)))
                with torch.no_grad():
                    f(batch(2))
                if each is model and between:
                    shard_policy(model, between)
                second = loss_of(f(batch(1)))
            first.backward()
            (3 * second).backward()
        same([full(p.grad) for p in model.parameters()], [full(p.grad) for p in plain.parameters()])
        types = bits.types(bits.make())
        assert gathered_as(decided) == (dict.fromkeys(types, "f32") if between else types), str(decided)


class Saved:
    """A training whose model, optimizer and scaler are saved, and loaded; a subclass says with what options."""

    options = None

    def state(self):
        weights, states = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": weights, "optimizer": states, "scaler": self.scaler.state_dict()}

    def load(self, folder, group=None):
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"], "options": self.options}
        set_state_dict(self.model, self.optimizer, **given)
        self.scaler.load_state_dict(state["scaler"])
        return self


class Training(Saved):
    """With a scaler whose scale grows every other step."""

    def __init__(self, bits, make=None, make_optimizer=torch.optim.AdamW, gathers=LOW, **options):
        torch._dynamo.reset()
        self.model = (make or bits.make)()
        self.run = sharded(self.model, policy=bits.policy, **options)
        self.decided = shard_policy(self.model, gathers)
        self.optimizer = make_optimizer(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def go(self, steps):
        train(self.run, self.model, steps, optimizer=self.optimizer, scaler=self.scaler)
        return self.numbers()

    def numbers(self):
        """Of all that is saved: masters are one tensor there."""
        saved = [full(each) for each in tree_leaves(self.state()) if isinstance(each, torch.Tensor)]
        return [*saved, torch.tensor(self.scaler.get_scale())]


class Held(dcp.DefaultSavePlanner):
    """Plans, and so saves, no sooner than it may."""

    def __init__(self):
        super().__init__()
        self.may_save = threading.Event()

    def create_local_plan(self):
        assert self.may_save.wait(60)
        return super().create_local_plan()


def saved_while_training_goes_on_and_resumed_by_a_new_model(bits):
    """The group is the saving thread's own: two threads that share one mix up their collectives."""
    folder, held = Path(sys.argv[1], f"resume{bits.inner}"), Held()
    first = Training(bits)
    saved, state = first.go(range(3)), first.state()
    assert {v.dtype for v in state["model"].values()} == {torch.float32}
    group = dist.new_group(backend="gloo")
    writing = dcp.async_save(state, checkpoint_id=folder, process_group=group, planner=held)
    wanted = first.go(range(3, 6))
    assert not any(map(torch.equal, saved, wanted)), "all moves on, scale and steps too"
    held.may_save.set()
    writing.result()
    alone = {"model": bits.make().state_dict()}
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    same(alone["model"].values(), saved[: len(alone["model"])])
    other = Training(bits).load(folder)
    same(other.numbers(), saved)
    same(other.go(range(3, 6)), wanted)
    assert gathered_as(other.decided) == bits.types(bits.make()), str(other.decided)


def cases_of(bits):
    """By name: a training in each of the usual ways, and what else holds for gathers of either size."""
    ways = {
        "by_block": {},
        "whole": {"how": "whole"},
        "through_inductor": {"lower": "inductor"},
        "by_torchs_own_autograd": {"lower": "eager"},
        "in_float16": {"low": torch.float16},
        "kept_until_backward": {"reshard_after_forward": False},
        "accumulated": {"accumulated": 3},
        "checkpointed": {"make": functools.partial(bits.make, checkpointed)},
        "checkpointed_inside": {"make": functools.partial(bits.make, block=Inside)},
        "asked_after_two_steps": {"steps": 5, "ask_after": 2},
        "asked_after_a_step_of_the_whole": {"how": "whole", "ask_after": 1},
    }
    others = (
        prefetched,
        initialized_on_meta,
        watched,
        written_shards_are_gathered_anew,
        two_forwards_before_their_backwards,
        saved_while_training_goes_on_and_resumed_by_a_new_model,
    )
    found = {name: functools.partial(check, bits, **options) for name, options in ways.items()}
    return found | {case.__name__: functools.partial(case, bits) for case in others}
