"""Run by test_eight_bits.py: FSDP2 with gathers of one byte, beside the same model whole on each rank."""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile import GradScaler, shard_policy
from tests.compiling import LOW
from tests.ranks import run_cases
from tests.sharding import ranks
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


def train(run, model, steps, accumulated=1, low=LOW, is_whole=False, optimizer=None):
    """Losses and weights, and the bytes that each step gathered."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses, sizes = [], []
    for i in steps:
        optimizer.zero_grad()
        gathered.clear()
        for k in range(accumulated):
            if not is_whole:
                model.set_requires_gradient_sync(k == accumulated - 1)
            with torch.autocast("cpu", low):
                loss = loss_of(run(batch(10 * i + k)))
            (loss / accumulated).backward()
        losses.append(loss.detach().clone())
        for p in model.parameters() if is_whole else ():
            if p.grad is not None:
                p.grad = averaged(p.grad)
        optimizer.step()
        sizes.append(sum(gathered))
    return losses + [full(p) for p in model.parameters()], sizes


def whole(make, how, lower, low, policy):
    """The model on one process, compiled as the sharded one is."""
    model = make()
    return (compile_(model, low, lower, policy) if how == "whole" else compile_blocks(model, low, lower, policy)), model


def gathered_as(decided):
    return {record.weight: record.gathered_as for record in decided.records()}


def wanted_types(model):
    """Weights of blocks in one byte, norms in four, the rest in two."""
    of_block = {n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2}
    return {n: "f32" if "norm" in n else "f8" if n in of_block else "bf16" for n, _ in model.named_parameters()}


SIZES = {"f32": 4, "bf16": 2, "f16": 2, "f8": 1}


def bytes_of_a_step(decided, model, keep=False, accumulated=1, over=None):
    """What each rank sends: its padded shard, for blocks twice in each forward and backward unless kept, else once."""
    types, total, over = gathered_as(decided), 0, over or dist.get_world_size()
    for name, p in model.named_parameters():
        shard = -(-len(p) // over) * p[0].numel() * SIZES[types[name]]
        total += shard * accumulated * (2 if name.startswith("blocks") and not keep else 1)
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
    low_name = {torch.bfloat16: "bf16", torch.float16: "f16"}[low]
    types = {n: low_name if t == "bf16" else t for n, t in wanted_types(make()).items()}
    assert gathered_as(decided) == types, str(decided)
    keep = options.get("reshard_after_forward") is False
    over = options["mesh"].size(1) if "mesh" in options else None
    assert sizes[-1] == bytes_of_a_step(decided, make(), keep, accumulated, over), (sizes, str(decided))
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


@case
def frozen_and_by_sgd():
    def make():
        model = Model()
        model.blocks[0].up.requires_grad_(False)
        return model

    model = make()
    run, decided = sharded(model, policy=FP8), shard_policy(model, LOW)
    found, _ = train(run, model, range(3), optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    run, plain = whole(make, "by_block", "aot_eager", LOW, FP8)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    same(found, train(run, plain, range(3), is_whole=True, optimizer=sgd)[0])
    assert gathered_as(decided) == wanted_types(Model()), str(decided)


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
            assert sum(gathered) == bytes_of_a_step(decided, Model())


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
    """In float16, with a scaler whose scale grows every other step."""

    def __init__(self):
        self.model = Model()
        self.run = sharded(self.model, policy=FP8)
        self.decided = shard_policy(self.model, LOW)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


@case
def saved_while_training_goes_on_and_resumed_by_a_new_model():
    folder, group = Path(sys.argv[1], "resume8"), dist.new_group(backend="gloo")
    first = Training()
    first.go(range(3))
    saved = [each.clone() for each in first.bits()]
    state = first.state()
    writing = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    wanted = first.go(range(3, 5))
    writing.result()
    alone = {"model": Model().state_dict()}
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    same(alone["model"].values(), saved[: len(alone["model"])])
    other = Training()
    state = other.state()
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.scaler.load_state_dict(state["scaler"])
    same(other.bits(), saved)
    same(other.go(range(3, 5)), wanted)
    assert gathered_as(other.decided) == wanted_types(Model()), str(other.decided)


@case
def one_rank_overflows():
    """All skip the step, and go on with the bits of the whole model."""
    half = torch.float16
    model = Model()
    run = sharded(model, low=half, policy=FP8)
    decided, scaler = shard_policy(model, half), GradScaler("cpu", init_scale=2.0**8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", half):
            loss = loss_of(run(batch(i)))
        before = full(model.blocks[0].up.weight)
        scaler.scale(loss * (1e30 if i == 2 and dist.get_rank() else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, full(model.blocks[0].up.weight)) == (i == 2)
    assert scaler.get_scale() == 2.0**7 and "f8" in gathered_as(decided).values()
    agree_types = {n: "f16" if t == "bf16" else t for n, t in wanted_types(Model()).items()}
    assert gathered_as(decided) == agree_types


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
}
OF_FOUR = {"hsdp", "hsdp_kept", "over_fewer_ranks"}

if __name__ == "__main__":
    run_cases(CASES, OF_FOUR)
