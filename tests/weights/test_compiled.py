"""Hoisted weights seen from outside: compiled calls, grad modes, late backwards, micro-batches, memory."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampcompile
import ampcompile.weights as weights
from ampcompile.weights.binding import PAYS
from tests.compiling import gradients
from tests.models import Net
from tests.weights.writers import unseen

lowered = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])


def amp(f: Any, lower: str, **options: Any) -> Any:
    return torch.compile(f, backend="amp", options={"lower": lower, **options})


def casts() -> int:
    return weights.weight_stats().casts


@lowered
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_takes_none_from_the_next(lower: str, first: Callable[[], Any]) -> None:
    conv = nn.Conv2d(2, 3, 3)
    x = torch.randn(1, 2, 6, 6)
    compiled = amp(conv, lower)
    with torch.autocast("cpu", torch.bfloat16):
        with first():
            compiled(x)
        out = compiled(x)
    assert out.requires_grad
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in conv.parameters())


@lowered
def test_both_calls_in_one_compiled_function(lower: str) -> None:
    conv = nn.Conv2d(2, 3, 3)

    def recycle(x: Tensor) -> Tensor:
        with torch.no_grad():
            first = conv(x)
        return conv(x) * first.mean()

    amp(recycle, lower)(torch.randn(1, 2, 6, 6)).float().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in conv.parameters())


@lowered
def test_micro_batches_cast_once_and_eval_shares_the_copies(lower: str) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    module[2].weight = nn.Parameter(module[0].weight.detach().t())  # tied memory, another object
    module[0].bias.requires_grad_(False)
    compiled = amp(module, lower)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        before = casts()
        for _ in range(4):
            compiled(torch.randn(3, 8)).float().square().mean().backward()
        assert casts() - before <= 1
        with torch.no_grad():
            compiled(torch.randn(3, 8))
        assert casts() - before <= 1
        optimizer.step()
        optimizer.zero_grad()
    del compiled, module, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert weights.weight_stats().copies == 0


def replace(model: nn.Module) -> None:
    for layer in model:
        layer.weight = nn.Parameter(torch.randn(64, 64))


def test_copies_go_with_their_weights_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    compiled = amp(model, "aot_eager")
    gc.collect()
    before = weights.weight_stats()
    for let_go in (replace, lambda model: model.to("meta")):
        with torch.no_grad():
            for _ in range(2):
                compiled(torch.randn(2, 64))
        assert weights.weight_stats().bytes == before.bytes + 4 * 64 * 64 * 2
        gc.disable()
        try:
            let_go(model)
            assert weights.weight_stats().bytes == before.bytes
        finally:
            gc.enable()
        left = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.bfloat16 and t.shape == (64, 64)]
        assert not left


@lowered
def test_fifty_calls_keep_one_copy_and_freed_copies_come_back(lower: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    compiled, x = amp(model, lower), torch.randn(4, 64)
    losses = [compiled(x).square().sum() for _ in range(PAYS)]  # from then on all is packed, where that is
    held = weights.weight_stats()
    losses += [compiled(x).square().sum() for _ in range(50)]
    assert weights.weight_stats() == held and held.copies == 4
    with torch.no_grad():
        results = [compiled(x) for _ in range(PAYS + 1)]
    ampcompile.free_copies(compiled)
    assert weights.weight_stats().copies == 0
    late = gradients(model, lambda _: losses[-1])
    assert torch.equal(compiled(x), results[0]) and weights.weight_stats().copies == 4
    assert all(map(torch.equal, late, gradients(model, lambda _: compiled(x).square().sum())))


def test_invalidate_reaches_what_a_models_graphs_read() -> None:
    reads = lambda m, x: F.linear(m.linear(x), m.tables[0])

    model = Net(reads, linear=nn.Linear(64, 64, bias=False), tables=[torch.randn(64, 64)])
    compiled = amp(model, "aot_eager")
    x = torch.eye(64)
    with torch.no_grad():
        for _ in range(12):
            compiled(x)
        unseen(model.tables[0])[31, 7] += 1
        weights.invalidate(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compiled(x), model(x))
