"""Run by test_ranks.py: FSDP2 with gathers of one byte, beside the same model whole on each rank."""

import functools
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import ampcompile
from ampcompile import GradScaler, shard_policy
from ampcompile.optim.fused_step import step_of
from tests.compiling import HALF, LOW
from tests.ranks import run_cases
from tests.sharding import debug_model, gathers
from tests.sharding.gathers import (
    Bits,
    Block,
    Training,
    batch,
    bytes_of_a_step,
    cases_of,
    check,
    compile_,
    full,
    gathered_as,
    loss_of,
    same,
    sharded,
    train,
    whole,
)

FP8 = "op linear=fp8"
EIGHT = Bits(FP8, 48)
CASES = cases_of(EIGHT)


def case(f):
    CASES[f.__name__] = f
    return f


def half_frozen():
    model = EIGHT.make()
    model.blocks[0].up.requires_grad_(False)
    return model


class Narrow(gathers.Model):
    def forward(self, x):
        return super().forward(x.to(LOW))


def of_16_bits():
    """A model whose parameters are bfloat16, for an optimizer with masters."""
    model = EIGHT.make()
    model.__class__ = Narrow
    return model.to(LOW)


def types_of(make, low=LOW):
    """How each weight of a model is gathered; of one in 16 bits no norm is in float32."""
    types = EIGHT.types(make(), low)
    return {n: "bf16" if t == "f32" and make is of_16_bits else t for n, t in types.items()}


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
            whole(model, low=low, policy=FP8)
        else:
            run, decided = EIGHT.sharded(model, low)
        scaler = GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
        numbers, _ = train(run, model, range(5), 1, low, is_whole, optimizer, scaler, 2 if scaled else None)
        assert step_of(optimizer).reason is None and scaler.get_scale() == (2.0**7 if scaled else 1)
        found.append(numbers)
    same(*found)
    assert gathered_as(decided) == types_of(make, low), str(decided)


sgd, our_sgd = (functools.partial(kind, momentum=0.9) for kind in (torch.optim.SGD, ampcompile.optim.SGD))
adamw, our_adamw = torch.optim.AdamW, ampcompile.optim.AdamW
of_remainders = functools.partial(our_adamw, masters="remainder")
STEPS = {
    "scaled_sgd": (sgd, HALF),
    "scaled_adamw": (adamw, HALF),
    "scaled_sgd_of_ours": (our_sgd, HALF),
    "scaled_adamw_of_ours": (our_adamw, HALF),
    "sgd_of_ours": (our_sgd, LOW, False),
    "adamw_of_ours": (our_adamw, LOW, False),
    "masters_kept_for_torchs": (keeping_masters, LOW, True, of_16_bits),
    "masters_of_sgd": (functools.partial(our_sgd, masters="float32"), LOW, False, of_16_bits),
    "masters_of_adamw": (of_remainders, LOW, True, of_16_bits),
}
"""An optimizer, the 16-bit type, whether there is a scaler, and the model."""
CASES |= {name: functools.partial(stepped, *given) for name, given in STEPS.items()}


@case
def a_weight_that_is_infinite_on_one_rank_gives_nothing_finite():
    model, run, _ = EIGHT.settled()
    with torch.no_grad(), torch.autocast("cpu", LOW):
        if dist.get_rank() == 1:
            model.blocks[0].up.weight.to_local().fill_(float("inf"))
        assert run(batch(0)).isnan().all()


@case
def gathers_in_float32_without_shard_policy():
    """Products run in fp8 all the same."""
    found = {}
    for policy in (FP8, "default"):
        model = EIGHT.make()
        found[policy], sizes = train(sharded(model, policy=policy), model, range(3))
        assert sizes[-1] == bytes_of_a_step(dict.fromkeys(dict(model.named_parameters()), "f32"), EIGHT.make())
    same(found[FP8], EIGHT.expected(3))
    assert not torch.equal(found[FP8][0], found["default"][0])


@case
def ranks_that_evaluate_more_or_less():
    """Where FSDP keeps all weights, it gathers nothing in evaluation, and nobody waits for another rank."""
    model, run, _ = EIGHT.settled(reshard_after_forward=False)
    with torch.autocast("cpu", LOW), torch.inference_mode():
        first = run(batch(0))
        for _ in range(3 * dist.get_rank()):
            assert torch.equal(run(batch(0)), first)
    model.reshard()
    for block in model.blocks:
        block.reshard()
    EIGHT.agree(model, run)


@case
def a_step_that_one_rank_skips_or_that_raises():
    model, run, _ = EIGHT.settled()
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
        EIGHT.agree(model, run)


@case
def gathers_outside_a_forward_of_the_root():
    """Of a block that is called by itself, and by hand: they are measured then."""
    model, run, _ = EIGHT.settled()
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
    EIGHT.agree(model, run)


class Both(Block):
    """A weight that a product in fp8 reads, and one that isn't; another whose type is that of rows."""

    def forward(self, x):
        return x + self.down(self.activation(self.up(self.norm(x)))) + (x @ self.up.weight.t()).sum()


@case
def why_not():
    """The table says why a weight isn't gathered in one byte; results are the whole model's all the same."""

    def both():
        model = EIGHT.make()
        model.blocks[0].__class__ = Both
        return model

    plain = EIGHT.make
    for make, policy, fp8, weight, kind, because in (
        (both, "op linear=fp8", True, "blocks.0.up.weight", "f32", "round it to bf16, f8"),
        (plain, "op linear=fp8_rowwise", True, "blocks.1.up.weight", "bf16", "no gathered byte has scales of columns"),
        (plain, FP8, True, "head.weight", "bf16", "not in fp8: N = 3 is no multiple of 16"),
        (plain, FP8, False, "blocks.0.up.weight", "bf16", "not in fp8: shard_policy was told fp8=False"),
        (of_16_bits, FP8, False, "blocks.0.up.weight", "bf16", "read in torch.bfloat16 by aten.linear in a compiled"),
    ):
        torch._dynamo.reset()
        model = make()
        run = sharded(model, policy=policy)
        decided = shard_policy(model, LOW, fp8=fp8)
        train(run, model, range(2))
        (record,) = (r for r in decided.records() if r.weight == weight)
        assert record.gathered_as == kind and because in record.because, record
        quantizes = make is both or (fp8 and "row" not in policy)
        EIGHT.agree(model, run, whole(make(), policy=policy if quantizes else "default"))
        assert weight in str(decided) and f" {kind} " in str(decided)


@case
def decided_anew_in_16_bits():
    """After fp8, by graphs of another policy; and in one byte again."""
    model, _, decided = EIGHT.settled(steps=3)
    for low, policy in ((LOW, "default"), (LOW, FP8)):
        for each in (*model.blocks, model.head):
            each.forward = compile_(type(each).forward.__get__(each), low, policy=policy)
        shard_policy(model, low)
        train(model, model, range(3), low=low)
        bits = Bits(policy, EIGHT.inner)
        assert gathered_as(decided) == bits.types(EIGHT.make(), low), str(decided)
        bits.agree(model, model)


@case
def ranks_whose_products_differ():
    """A weight that one rank multiplies in 16 bits, as it has compiled another graph, is gathered in four bytes."""
    model = EIGHT.make()
    policy = FP8 if dist.get_rank() else "op linear=fp8, module down=low"
    run = sharded(model, policy=policy)
    decided = shard_policy(model, LOW)
    train(run, model, range(3))
    types = types_of(EIGHT.make)
    assert gathered_as(decided) == types | {n: "f32" for n in types if n.endswith("down.weight")}, str(decided)
    assert {r.because for r in decided.records() if r.weight.endswith("down.weight")} == {
        "in the first forward, some rank read it in another type or not at all"
    }


def loaded_on_other_ranks(name, make=EIGHT.make, *how):
    """Four save while they train on, two go on and save, four go on: with the bits that were saved, in one byte."""
    folders, group = [Path(sys.argv[1], f"{name}{n}") for n in (4, 2)], dist.new_group(backend="gloo")
    start = functools.partial(Training, EIGHT, make, *how)
    first, pair = start(), DeviceMesh("cpu", [0, 1])
    saved = first.go(range(3))
    writing = dcp.async_save(first.state(), checkpoint_id=folders[0], process_group=group)
    first.go(range(3, 5))
    writing.result()
    by_two = [None]
    if dist.get_rank() < 2:
        second = start(mesh=pair).load(folders[0], pair.get_group())
        same(second.numbers(), saved)
        by_two[0] = second.go(range(3, 6))
        dcp.save(second.state(), checkpoint_id=folders[1], process_group=pair.get_group())
        assert gathered_as(second.decided) == types_of(make), str(second.decided)
        wide = start(gathers=torch.float32, mesh=pair).load(folders[0], pair.get_group())
        same(by_two[0], wide.go(range(3, 6)))
    dist.broadcast_object_list(by_two, 0)
    third = start().load(folders[1])
    same(third.numbers(), by_two[0])
    third.go(range(2))
    assert gathered_as(third.decided) == types_of(make), str(third.decided)


class Turned(Block):
    """A weight that forward reads transposed, as GPT-2's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.inner = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return super().forward(x) + x @ self.inner


class Shared(Block):
    """Two layers that share a weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.again = nn.Linear(16, 48, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + self.down(self.again(x))


def by_columns(p):
    return Shard(p.dim() - 1) if len(p) > 3 else None


def checked(make_block=Block, **options):
    """A training with other blocks."""
    check(EIGHT, make=functools.partial(EIGHT.make, block=make_block), **options)


CASES |= {
    "gradients_in_e4m3": functools.partial(checked, policy="op linear=fp8_e4m3"),
    "read_transposed": functools.partial(checked, Turned, policy="op linear=fp8, op matmul=fp8"),
    "shared": functools.partial(checked, Shared),
    "sharded_by_columns": functools.partial(checked, shard_placement_fn=by_columns),
}


@case
def memory_of_unsharded_weights():
    """One byte a number in forward, two in backward, or from forward on where FSDP keeps the weight until then."""
    for keep, wanted in ((False, [1, 2]), (True, [2, 2])):
        model, run, _ = EIGHT.settled(reshard_after_forward=not keep)
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
        model, run, decided = EIGHT.settled(reshard_after_forward=not keep)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as asked:
            train(run, model, range(1), accumulated=3)
            with torch.autocast("cpu", LOW), torch.no_grad():
                for _ in range(3):
                    run(batch(0))
        found = [call.args[0].nbytes for call in asked.call_args_list]
        assert found == [4 * [*gathered_as(decided).values()].count("f8")] * (4 if keep else 6), found


def hsdp(**options):
    checked(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), steps=3, **options)


def over_fewer_ranks():
    """With a number of ranks FSDP2 has no extension points: blocks stay in float32, and say why."""
    model = EIGHT.make()
    run, decided = EIGHT.sharded(model, reshard_after_forward=2)
    found, _ = train(run, model, range(3))
    same(found, EIGHT.expected(3))
    assert all("number of ranks" in r.because for r in decided.records() if r.weight.startswith("blocks"))


OF_FOUR = {
    "hsdp": hsdp,
    "hsdp_kept": functools.partial(hsdp, reshard_after_forward=False),
    "over_fewer_ranks": over_fewer_ranks,
    "loaded_on_other_ranks": functools.partial(loaded_on_other_ranks, "float32"),
    "masters_loaded_on_other_ranks": functools.partial(loaded_on_other_ranks, "masters", of_16_bits, of_remainders),
}
"""On four ranks."""
CASES |= OF_FOUR

if __name__ == "__main__":
    run_cases(CASES, OF_FOUR)
