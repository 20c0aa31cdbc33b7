"""Run by test_eight_bits.py: FSDP2 with gathers of one byte, beside the same model whole on each rank."""

import functools
import math
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile import GradScaler, shard_policy
from ampcompile.optim.fused_step import step_of
from tests.compiling import HALF, LOW
from tests.ranks import run_cases
from tests.sharding import debug_model, ranks
from tests.sharding.paper import shard
from tests.sharding.ranks import Block, compile_, compile_blocks, full, gathered, loss_of, same, sharded, ways

CASES = {}
FP8 = "op linear=fp8"
batch = functools.partial(ranks.batch, rows=16)


def case(f):
    CASES[f.__name__] = f
    return f


def Model(through=lambda block, x: block(x)):
    """Products of 16 and 48 features, and a head of 3, which no product in fp8 can have."""
    model = ranks.Model(through)
    torch.manual_seed(0)
    model.blocks = nn.ModuleList([Block(16, 48), Block(16, 48)])
    return model


def averaged(gradient):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def train(run, model, steps, accumulated=1, low=LOW, is_whole=False, optimizer=None, scaler=None, overflows=None):
    """Losses and weights, and the bytes that each step gathered; in step `overflows` those of rank 1 are infinite."""
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
        for p in model.parameters() if is_whole else ():
            if p.grad is not None:
                p.grad = averaged(p.grad)
        scaler.step(optimizer)
        scaler.update()
        sizes.append(sum(gathered))
    return losses + [full(p) for p in model.parameters()], sizes


def whole(make, how, lower, low, policy):
    """The model on one process, compiled as the sharded one is."""
    model = make()
    return (compile_(model, low, lower, policy) if how == "whole" else compile_blocks(model, low, lower, policy)), model


def gathered_as(decided):
    return {record.weight: record.gathered_as for record in decided.records()}


def wanted_types(model, low=LOW):
    """Weights of blocks in one byte, norms in four, the rest in two."""
    of_block = {n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}
    rest = {LOW: "bf16", HALF: "f16"}[low]
    return {n: "f32" if "norm" in n else "f8" if n in of_block else rest for n, _ in model.named_parameters()}


SIZES = {"f32": 4, "bf16": 2, "f16": 2, "f8": 1}


def bytes_of_a_step(types, model, keep=False, accumulated=1, over=None, twice=("blocks",)):
    """What each rank sends: its padded shard, for blocks twice in each forward and backward unless kept, else once."""
    total, over = 0, over or dist.get_world_size()
    for name, p in model.named_parameters():
        total += (
            shard(p.shape, over) * SIZES[types[name]] * accumulated * (2 if name.startswith(twice) and not keep else 1)
        )
    return total


def check(how="by_block", lower="aot_eager", steps=4, accumulated=1, make=Model, policy=FP8, low=LOW, **options):
    """Trains with gathers of one byte; the numbers are those of the whole model, quantized too."""
    model = make()
    run = sharded(model, how, lower, low, policy, **options)
    decided = shard_policy(model, low)
    found, sizes = train(run, model, range(steps), accumulated, low)
    if dist.get_world_size() == 2:
        wanted, _ = train(*whole(make, how, lower, low, policy), range(steps), accumulated, low, is_whole=True)
    else:  # more ranks' gradients are added up in FSDP's order: beside its gathers in float32
        plain = make()
        wanted, _ = train(sharded(plain, how, lower, low, policy, **options), plain, range(steps), accumulated, low)
    same(found, wanted)
    assert gathered_as(decided) == wanted_types(make(), low), str(decided)
    keep = options.get("reshard_after_forward") is False
    over = options["mesh"].size(1) if "mesh" in options else None
    assert sizes[-1] == bytes_of_a_step(gathered_as(decided), make(), keep, accumulated, over), (sizes, str(decided))
    return model, run, decided


CASES |= ways(check) | {
    "gradients_in_e4m3": functools.partial(check, policy="op linear=fp8_e4m3"),
    "checkpointed": functools.partial(
        check, make=functools.partial(Model, lambda b, x: checkpoint(b, x, use_reentrant=False))
    ),
}


def settled(make=Model, policy=FP8, low=LOW, steps=2, **options):
    """A model whose weights are gathered in one byte, and what tells so."""
    model = make()
    run = sharded(model, "by_block", "aot_eager", low, policy, **options)
    decided = shard_policy(model, low)
    train(run, model, range(steps), low=low)
    return model, run, decided


def agree(run, model, x, make=Model, policy=FP8):
    """One step has the result and gradients of the whole model with the same weights."""
    plain = make()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.data.copy_(full(ours))
    plain = compile_blocks(plain, LOW, "aot_eager", policy)
    model.zero_grad()
    with torch.autocast("cpu", LOW):
        found, wanted = run(x), plain(x)
        assert torch.equal(found, wanted)
        loss_of(found).backward()
        loss_of(wanted).backward()
    gradients = [averaged(p.grad) for p in plain.parameters() if p.grad is not None]
    same([full(p.grad) for p in model.parameters() if p.grad is not None], gradients)


@case
def prefetched():
    model = Model()
    run = sharded(model, policy=FP8)
    decided = shard_policy(model, LOW)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    found, _ = train(run, model, range(4))
    same(found, train(*whole(Model, "by_block", "aot_eager", LOW, FP8), range(4), is_whole=True)[0])
    assert gathered_as(decided) == wanted_types(Model()), str(decided)


def half_frozen():
    model = Model()
    model.blocks[0].up.requires_grad_(False)
    return model


class Narrow(ranks.Model):
    def forward(self, x):
        return super().forward(x.to(LOW))


def of_16_bits():
    """A model whose parameters are bfloat16, for an optimizer with masters."""
    model = Model()
    model.__class__ = Narrow
    return model.to(LOW)


def narrow_types():
    return {n: "f8" if t == "f8" else "bf16" for n, t in wanted_types(Model()).items()}


def keeping_masters(params, lr):
    ampcompile.keep_masters(optimizer := torch.optim.AdamW(params, lr=lr))
    return optimizer


def stepped(make_optimizer, low=LOW, scaled=True, make=half_frozen):
    """By a fused step; rank 1 overflows once if a scaler scales, and all skip that step."""
    found = []
    for is_whole in (False, True):
        torch._dynamo.reset()
        run = model = make()
        if is_whole:
            compile_blocks(model, low, "aot_eager", FP8)
        else:
            run, decided = sharded(model, low=low, policy=FP8), shard_policy(model, low)
        scaler = GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
        numbers, _ = train(run, model, range(5), 1, low, is_whole, optimizer, scaler, 2 if scaled else None)
        assert step_of(optimizer).reason is None and scaler.get_scale() == (2.0**7 if scaled else 1)
        found.append(numbers)
    same(*found)
    assert gathered_as(decided) == (narrow_types() if make is of_16_bits else wanted_types(make(), low)), str(decided)


our_sgd = functools.partial(ampcompile.optim.SGD, momentum=0.9)
our_adamw = ampcompile.optim.AdamW
by_masters = functools.partial(stepped, make=of_16_bits)
CASES |= {
    "scaled_sgd": functools.partial(stepped, functools.partial(torch.optim.SGD, momentum=0.9), HALF),
    "scaled_adamw": functools.partial(stepped, torch.optim.AdamW, HALF),
    "scaled_sgd_of_ours": functools.partial(stepped, our_sgd, HALF),
    "scaled_adamw_of_ours": functools.partial(stepped, our_adamw, HALF),
    "sgd_of_ours": functools.partial(stepped, our_sgd, scaled=False),
    "adamw_of_ours": functools.partial(stepped, our_adamw, scaled=False),
    "masters_kept_for_torchs": functools.partial(by_masters, keeping_masters),
    "masters_of_sgd": functools.partial(by_masters, functools.partial(our_sgd, masters="float32"), scaled=False),
    "masters_of_adamw": functools.partial(by_masters, functools.partial(our_adamw, masters="remainder")),
}


@case
def initialized_on_meta():
    with torch.device("meta"):
        model = Model()
    run, decided = sharded(model, policy=FP8), shard_policy(model, LOW)
    model.to_empty(device="cpu")
    state = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, Model().state_dict(), options=state)
    found, _ = train(run, model, range(3))
    same(found, train(*whole(Model, "by_block", "aot_eager", LOW, FP8), range(3), is_whole=True)[0])
    assert gathered_as(decided) == wanted_types(Model()), str(decided)


@case
def written_shards_are_measured_anew():
    """Also by one rank alone, and to numbers that the scale from before wouldn't hold."""
    model, run, decided = settled()
    first, rank = model.blocks[0].up, dist.get_rank()
    states = {k: v.clone() for k, v in model.state_dict().items()}
    writers = [
        lambda: None,
        lambda: first.weight.data.mul_(-100.0),
        lambda: first.weight.to_local().mul_(1e-3) if rank == 0 else None,
        lambda: first.weight._local_tensor.data.add_(7.0) if rank == 1 else None,
        lambda: first.weight.to_local().numpy().fill(300.0) if rank == 0 else None,
        lambda: model.load_state_dict({k: v * 20 for k, v in states.items()}, assign=True),
        lambda: model._apply(lambda t: t * 0.05),
        lambda: first.weight.to_local().fill_(float("inf")) if rank == 1 else None,
    ]
    for write in writers:
        with torch.no_grad():
            write()
        gathered.clear()
        if write is writers[-1]:
            with torch.autocast("cpu", LOW), torch.no_grad():
                assert run(batch(0)).isnan().all()
        else:
            agree(run, model, batch(77))
            assert sum(gathered) == bytes_of_a_step(gathered_as(decided), Model())


@case
def ranks_that_evaluate_more_or_less():
    """Where FSDP keeps all weights, it gathers nothing in evaluation, and nobody waits for another rank."""
    model, run, _ = settled(reshard_after_forward=False)
    with torch.autocast("cpu", LOW), torch.inference_mode():
        first = run(batch(0))
        for _ in range(3 * dist.get_rank()):
            assert torch.equal(run(batch(0)), first)
    model.reshard()
    for block in model.blocks:
        block.reshard()
    agree(run, model, batch(1))


@case
def a_step_that_one_rank_skips_or_that_raises():
    model, run, _ = settled()
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    for each in range(2):
        with torch.autocast("cpu", LOW):
            loss_of(run(batch(each))).backward()
        try:
            if dist.get_rank():
                raise ValueError("no such token")
            optimizer.step()
        except ValueError:
            pass
        agree(run, model, batch(5 + each))


@case
def gathers_outside_a_forward_of_the_root():
    """Of a block that is called by itself, and by hand: they are measured then."""
    model, run, _ = settled()
    block = model.blocks[1]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50.0)
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        plain = Block(16, 48)
        for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
            theirs.copy_(full(ours))
        plain.forward = compile_(plain.forward, LOW, "aot_eager", FP8)
        with torch.autocast("cpu", LOW):
            assert torch.equal(block(x), plain(x))
            block.reshard()
            block.unshard()
            assert torch.equal(block(x), plain(x))
        block.reshard()
    agree(run, model, batch(3))


@case
def two_forwards_before_their_backwards():
    """And an evaluation between; what a root keeps after it is what the next forward reads."""
    model, run, _ = settled()
    plain = compile_blocks(Model(), LOW, "aot_eager", FP8)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.data.copy_(full(ours))
    for each, f in ((model, run), (plain, plain)):
        each.zero_grad()
        with torch.autocast("cpu", LOW):
            first = loss_of(f(batch(0)))
            with torch.no_grad():
                f(batch(2))
            second = loss_of(f(batch(1)))
        first.backward()
        sums = [averaged(p.grad) for p in each.parameters()] if each is plain else []
        plain.zero_grad()
        (3 * second).backward()
    wanted = [one + averaged(p.grad) for one, p in zip(sums, plain.parameters(), strict=True)]
    same([full(p.grad) for p in model.parameters()], wanted)


class Both(Block):
    """A weight that a product in fp8 reads, and one that isn't; another whose type is that of rows."""

    def forward(self, x):
        return x + self.down(self.activation(self.up(self.norm(x)))) + (x @ self.up.weight.t()).sum()


@case
def why_not():
    """The table says why a weight isn't gathered in one byte; results are the whole model's all the same."""

    def both():
        model = Model()
        model.blocks[0].__class__ = Both
        return model

    for make, policy, fp8, weight, kind, because in (
        (both, "op linear=fp8", True, "blocks.0.up.weight", "f32", "round it to bf16, f8"),
        (Model, "op linear=fp8_rowwise", True, "blocks.1.up.weight", "bf16", "no gathered byte has scales of columns"),
        (Model, FP8, True, "head.weight", "bf16", "not in fp8: N = 3 is no multiple of 16"),
        (Model, FP8, False, "blocks.0.up.weight", "bf16", "not in fp8: shard_policy was told fp8=False"),
        (of_16_bits, FP8, False, "blocks.0.up.weight", "bf16", "read in torch.bfloat16 by aten.linear in a compiled"),
    ):
        torch._dynamo.reset()
        model = make()
        run = sharded(model, policy=policy)
        decided = shard_policy(model, LOW, fp8=fp8)
        train(run, model, range(2))
        (record,) = (r for r in decided.records() if r.weight == weight)
        assert record.gathered_as == kind and because in record.because, record
        agree(run, model, batch(9), make, policy if make is both or (fp8 and "row" not in policy) else "default")
        assert weight in str(decided) and f" {kind} " in str(decided)


@case
def ranks_whose_products_differ():
    """A weight that one rank multiplies in 16 bits, as it has compiled another graph, is gathered in four bytes."""
    model = Model()
    policy = FP8 if dist.get_rank() else "op linear=fp8, module down=low"
    run = sharded(model, policy=policy)
    decided = shard_policy(model, LOW)
    train(run, model, range(3))
    types = wanted_types(Model())
    assert gathered_as(decided) == types | {n: "f32" for n in types if n.endswith("down.weight")}, str(decided)
    assert {r.because for r in decided.records() if r.weight.endswith("down.weight")} == {
        "in the first forward, some rank read it in another type or not at all"
    }


class Training(ranks.Training):
    """With a scaler whose scale grows every other step."""

    def __init__(self, make=Model, make_optimizer=torch.optim.AdamW, gathers=LOW, **options):
        torch._dynamo.reset()
        self.model = make()
        self.run = sharded(self.model, policy=FP8, **options)
        self.decided = shard_policy(self.model, gathers)
        self.optimizer = make_optimizer(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def bits(self):
        """Of all that is saved: masters are one tensor there."""
        saved = [full(each) for each in tree_leaves(self.state()) if isinstance(each, torch.Tensor)]
        return [*saved, torch.tensor(self.scaler.get_scale())]

    def load(self, folder, group=None):
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        return self


@case
def saved_while_training_goes_on_and_resumed_by_a_new_model():
    folder, group = Path(sys.argv[1], "resume8"), dist.new_group(backend="gloo")
    first = Training()
    saved = first.go(range(3))
    writing = dcp.async_save(first.state(), checkpoint_id=folder, process_group=group)
    wanted = first.go(range(3, 5))
    writing.result()
    alone = {"model": Model().state_dict()}
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    same(alone["model"].values(), saved[: len(alone["model"])])
    other = Training().load(folder)
    same(other.bits(), saved)
    same(other.go(range(3, 5)), wanted)
    assert gathered_as(other.decided) == wanted_types(Model()), str(other.decided)


def loaded_on_other_ranks(name, *how):
    """Four save while they train on, two go on and save, four go on: with the bits that were saved, in one byte."""
    folders, group = [Path(sys.argv[1], f"{name}{n}") for n in (4, 2)], dist.new_group(backend="gloo")
    first, pair = Training(*how), DeviceMesh("cpu", [0, 1])
    saved = first.go(range(3))
    writing = dcp.async_save(first.state(), checkpoint_id=folders[0], process_group=group)
    first.go(range(3, 5))
    writing.result()
    by_two = [None]
    if dist.get_rank() < 2:
        second = Training(*how, mesh=pair).load(folders[0], pair.get_group())
        same(second.bits(), saved)
        by_two[0] = second.go(range(3, 6))
        dcp.save(second.state(), checkpoint_id=folders[1], process_group=pair.get_group())
        types = gathered_as(second.decided)
        assert types == (narrow_types() if how else wanted_types(Model())), str(second.decided)
        wide = Training(*how, gathers=torch.float32, mesh=pair).load(folders[0], pair.get_group())
        same(by_two[0], wide.go(range(3, 6)))
    dist.broadcast_object_list(by_two, 0)
    third = Training(*how).load(folders[1])
    same(third.bits(), by_two[0])
    third.go(range(2))
    assert gathered_as(third.decided) == (narrow_types() if how else wanted_types(Model())), str(third.decided)


class Turned(Block):
    """A weight that forward reads transposed, as GPT-2's."""

    def __init__(self):
        super().__init__(16, 48)
        self.inner = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return super().forward(x) + x @ self.inner


class Inside(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Shared(Block):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__(16, 48)
        self.again = nn.Linear(16, 48, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + self.down(self.again(x))


def by_columns(p):
    return Shard(p.dim() - 1) if len(p) > 3 else None


def of(make_block):
    """A model of other blocks."""
    model = Model()
    torch.manual_seed(1)
    model.blocks = nn.ModuleList([make_block(), make_block()])
    return model


CASES |= {
    "read_transposed": functools.partial(
        check, make=functools.partial(of, Turned), policy="op linear=fp8, op matmul=fp8"
    ),
    "shared": functools.partial(check, make=functools.partial(of, Shared)),
    "sharded_by_columns": functools.partial(check, shard_placement_fn=by_columns),
    "checkpointed_inside": functools.partial(check, make=functools.partial(of, functools.partial(Inside, 16, 48))),
}


@case
def memory_of_unsharded_weights():
    """One byte a number in forward, two in backward, or from forward on where FSDP keeps the weight until then."""
    for keep, wanted in ((False, [1, 2]), (True, [2, 2])):
        model, run, _ = settled(reshard_after_forward=not keep)
        block = model.blocks[0]
        compiled, found = block.forward, []

        def tell(block=block, found=found):
            gathered = block.up.weight.gathering.param
            with torch._C.DisableTorchFunctionSubclass():
                held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gathered.numbers[:2]}
                held[0] = block.up.weight.untyped_storage().nbytes()
                found.append(sum(held.values()) / block.up.weight.numel())

        def forward(x, compiled=compiled, tell=tell):
            x = x.clone().requires_grad_()
            x.register_hook(lambda _: tell())
            out = compiled(x)
            tell()
            return out

        block.forward = forward
        with torch.autocast("cpu", LOW):
            loss_of(run(batch(0))).backward()
        assert found == wanted, (keep, found)


@case
def watched():
    """A watched graph computes its magnitudes beside gathers of one byte, and changes no number."""
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    options = {"dtype": LOW, "lower": "aot_eager", "products": "torch", "watch": True, "policy": FP8}
    run, decided = torch.compile(model, backend="amp", options=options), shard_policy(model, LOW)
    found, _ = train(run, model, range(3))
    same(found, train(*whole(Model, "whole", "aot_eager", LOW, FP8), range(3), is_whole=True)[0])
    assert gathered_as(decided) == wanted_types(Model()), str(decided)
    assert ampcompile.watch(run).report().first is None
    with torch.autocast("cpu", LOW):
        assert {r.weight: r.gathered_as for r in ampcompile.explain(run)(batch(0)).gathers} == wanted_types(Model())


@case
def debug_model_of_torchtitan():
    """A third of the bytes of gathers in float32, with the blocks in fp8 and the head compiled."""
    model, decided = debug_model.by_amp(FP8, head=True, lower="aot_eager")
    _, size, _ = debug_model.train(model, steps=2, rows=1, length=4)
    types, twice = gathered_as(decided), ("blocks", "tok_embeddings")
    assert size == bytes_of_a_step(types, debug_model.Llama(), twice=twice)
    assert round(size / bytes_of_a_step(dict.fromkeys(types, "f32"), debug_model.Llama(), twice=twice), 2) == 0.33


@case
def magnitudes_take_one_collective_in_each_forward_that_gathers():
    """Of 4 bytes a weight, in accumulation too; in none where FSDP has all weights."""
    for keep in (False, True):
        model, run, decided = settled(reshard_after_forward=not keep)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as asked:
            train(run, model, range(1), accumulated=3)
            with torch.autocast("cpu", LOW), torch.no_grad():
                for _ in range(3):
                    run(batch(0))
        found = [call.args[0].nbytes for call in asked.call_args_list]
        assert found == [4 * [*gathered_as(decided).values()].count("f8")] * (4 if keep else 6), found


def hsdp(**options):
    check(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), steps=3, **options)


def over_fewer_ranks():
    """With a number of ranks FSDP2 has no extension points: blocks stay in float32, and say why."""
    model = Model()
    run = sharded(model, policy=FP8, reshard_after_forward=2)
    decided = shard_policy(model, LOW)
    found, _ = train(run, model, range(3))
    same(found, train(*whole(Model, "by_block", "aot_eager", LOW, FP8), range(3), is_whole=True)[0])
    assert all("number of ranks" in r.because for r in decided.records() if r.weight.startswith("blocks"))


CASES |= {
    "hsdp": hsdp,
    "hsdp_kept": functools.partial(hsdp, reshard_after_forward=False),
    "over_fewer_ranks": over_fewer_ranks,
    "loaded_on_other_ranks": functools.partial(loaded_on_other_ranks, "float32"),
    "masters_loaded_on_other_ranks": functools.partial(
        loaded_on_other_ranks, "masters", of_16_bits, functools.partial(our_adamw, masters="remainder")
    ),
}
OF_FOUR = ["hsdp", "hsdp_kept", "over_fewer_ranks", "loaded_on_other_ranks", "masters_loaded_on_other_ranks"]

if __name__ == "__main__":
    run_cases(CASES, OF_FOUR)
