"""Activation checkpoints around compiled callables: backward runs again what forward ran, whatever region it is in."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from tests.compiling import HALF, same_bits
from tests.threads import running

Region = Callable[[], AbstractContextManager[Any]]
DISABLED = functools.partial(torch.autocast, "cpu", enabled=False)
ENABLED = functools.partial(torch.autocast, "cpu")
OF_ANOTHER = functools.partial(torch.autocast, "cuda", enabled=False)
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


class RunsAgain(torch.autograd.Function):
    """A checkpoint as other libraries write them."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(gradient)
        return None, x.grad


def nested(inside: bool, function: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(function, x, use_reentrant=False), x, use_reentrant=inside)


CHECKPOINTS = {
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    "nested": functools.partial(nested, False),
    "nested, reentrant": functools.partial(nested, True),
    "custom function": RunsAgain.apply,
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def train(
    run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, around: Region, around_backward: Region = nullcontext
) -> list[Tensor]:
    """The result of a forward and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with around():
        y = run(x)
    with around_backward():
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(
    ("around", "around_backward", "dtype"),
    [
        (nullcontext, nullcontext, None),
        (nullcontext, DISABLED, None),
        (nullcontext, ENABLED, HALF),
        (ENABLED, nullcontext, HALF),
        (DISABLED, nullcontext, HALF),
        (DISABLED, DISABLED, None),
        (DISABLED, ENABLED, None),
        (OF_ANOTHER, nullcontext, None),
    ],
)
@pytest.mark.filterwarnings("ignore:.* runs in float32:ampcompile.AmpWarning")
def test_gradients_are_those_without_a_checkpoint(
    around: Region, around_backward: Region, dtype: torch.dtype | None
) -> None:
    module, x = model(), torch.randn(4, 8)
    compiled = torch.compile(module, backend="amp", options={"lower": "aot_eager", "dtype": dtype})
    plain = train(compiled, module, x, around)
    exact = train(module, module, x, nullcontext)
    assert same_bits(plain, exact) is (around is DISABLED)
    for name, run_under in CHECKPOINTS.items():
        again = train(functools.partial(run_under, compiled), module, x, around, around_backward)
        assert same_bits(again, plain), name


@pytest.mark.parametrize("around", [nullcontext, DISABLED])
def test_backward_may_run_in_another_thread(around: Region) -> None:
    module = model()
    compiled = torch.compile(module, backend="amp", options={"lower": "aot_eager"})
    for name in ("not reentrant", "reentrant", "custom function"):
        x = torch.randn(4, 8, requires_grad=True)
        plain = train(compiled, module, x.detach(), around)
        module.zero_grad()
        with around():
            loss = CHECKPOINTS[name](compiled, x).square().sum()
        with running(loss.backward):
            pass
        assert same_bits([x.grad, *(p.grad for p in module.parameters())], plain[1:]), name


def test_a_region_in_what_is_checkpointed_is_open_again_in_backward() -> None:
    module, x = model(), torch.randn(4, 8)
    compiled = torch.compile(module, backend="amp", options={"lower": "aot_eager"})

    def in_regions(x: Tensor) -> Tensor:
        with DISABLED():
            y = compiled(x)
        with torch.autocast("cpu", HALF):
            z = compiled(x)
        return y + compiled(x) + z

    plain = train(in_regions, module, x, nullcontext)
    for name, run_under in CHECKPOINTS.items():
        assert same_bits(train(functools.partial(run_under, in_regions), module, x, nullcontext), plain), name


@pytest.mark.parametrize("lower", ["aot_eager", "eager"])
@pytest.mark.parametrize("saves", [True, False])
def test_a_selective_checkpoint_sees_the_graph_s_ops_alone(saves: bool, lower: str) -> None:
    """Copies of weights are cast, and compared, by ops that run in some calls."""
    module, x = model(), torch.randn(4, 8)
    compiled = torch.compile(module, backend="amp", options={"lower": lower})
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: saves)
    selective = functools.partial(checkpoint, compiled, use_reentrant=False, context_fn=contexts)
    for _ in range(2):
        assert same_bits(train(selective, module, x, nullcontext), train(compiled, module, x, nullcontext))
        with torch.no_grad():
            module[0].weight.add_(1)


class Layer(nn.Module):
    """Is checkpointed around its call, as layers of transformers are."""

    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def __call__(self, x: Tensor) -> Tensor:
        call = super().__call__
        return call(x) if self.how is None else CHECKPOINTS[self.how](call, x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(how: str | None) -> nn.Sequential:
    made = nn.Sequential(Layer(how), Layer(how))
    for i, layer in enumerate(made):
        layer.compile(backend="amp", options={"lower": "aot_eager"})
        with torch.no_grad():
            layer.linear.weight.copy_(torch.eye(8) + 0.01 * i)
            layer.linear.bias.zero_()
    return made


@pytest.mark.parametrize("around", [nullcontext, ENABLED, DISABLED])
def test_layers_compiled_one_by_one(around: Region) -> None:
    x, plain = torch.randn(4, 8), layers(None)
    expected = train(plain, plain, x, around)
    for how in ("not reentrant", "reentrant"):
        again = layers(how)
        assert same_bits(train(again, again, x, around), expected), how


def test_torchs_other_ways_and_compiled_autograd() -> None:
    x, plain = torch.randn(4, 8), layers(None)
    expected = train(plain, plain, x, nullcontext)
    composed, wrapped, sequential = layers(None), layers(None), layers(None)
    for layer in composed:
        composable_checkpoint(layer)
    wrapped[0], wrapped[1] = map(checkpoint_wrapper, wrapped)
    in_parts = functools.partial(checkpoint_sequential, sequential, 2, use_reentrant=False)
    for module, run in ((composed, composed), (wrapped, wrapped), (sequential, lambda x: in_parts(input=x))):
        assert same_bits(train(run, module, x, nullcontext), expected)
    traced = functools.partial(compiled_autograd._enable, torch.compile(backend="eager"))
    for how in ("not reentrant", "reentrant"):
        again = layers(how)
        assert same_bits(train(again, again, x, nullcontext, traced), expected), how


class Counted(nn.Module):
    """Counts the batches that its norm sees, with a piece between its graphs that runs eagerly."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.inner, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        torch._dynamo.graph_break()
        h = torch.tanh(h) if self.inner is None else self.inner(h)
        torch._dynamo.graph_break()
        return x + self.last(h)


@pytest.mark.parametrize("lower", [pytest.param("eager", marks=pytest.mark.ci), "aot_eager"])
@pytest.mark.parametrize("kind", ["not reentrant", "to the end", "nested"])
def test_a_checkpoint_around_several_graphs_runs_again_once_in_each_backward(kind: str, lower: str) -> None:
    model, other = Counted(), Counted(Counted())
    again = CHECKPOINTS[kind]
    run, around = (torch.compile(m, backend="amp", options={"lower": lower}) for m in (model, other))
    x = torch.randn(4, 8, requires_grad=True)
    y = again(run, x)
    y = again(run, y) + again(around, y)
    for backwards in (1, 2):
        y.square().sum().backward(retain_graph=backwards == 1)
        counted = [int(m.norm.num_batches_tracked) for m in (model, other, other.inner)]
        assert counted == [2 + 2 * backwards, 1 + backwards, 1 + backwards], "one that runs it twice, and two once"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rank'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_a_layer_sharded_inside_a_block_with_a_checkpoint_is_sharded_again_after_backward(lower, one_rank):
    block = Counted(Counted())
    block.compile(backend="amp", options={"lower": lower})
    fully_shard(block.inner.last)
    fully_shard(block)
    x, optimizer = torch.randn(4, 8), torch.optim.SGD(block.parameters(), lr=1.0)
    for _ in range(2):
        checkpoint(block, x, use_reentrant=False).square().mean().backward()
        assert type(block.inner.last.weight).__name__ == "DTensor", "else the next step reads the weight of before"
        optimizer.step()
