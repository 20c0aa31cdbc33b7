"""Copies of weights after every known way to write a weight, and after reads: fresh, and cast only when needed."""

import contextlib
from collections.abc import Callable

import pytest
import torch

from ampcompile.weights import writers as writers_module
from ampcompile.weights.binding import Binding, bind, invalidate, weight_stats
from ampcompile.weights.memory import ticks
from tests.weights.searching import searches_are_cheap as searches_are_cheap
from tests.weights.writers import EXACT, SAMPLED, Net, read, unsampled

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def watched_net(mode: str, dtype: torch.dtype = torch.bfloat16) -> Net:
    """A net whose `look()` checks that the copies of its weights are up to date."""
    net = Net()
    binding: Binding = bind([dtype] * 5)

    def look() -> None:
        with MODES[mode]():
            copies = binding.copies(net.weights())
        for copy, weight in zip(copies, net.weights(), strict=True):
            torch.testing.assert_close(copy, weight.detach().to(dtype), rtol=0, atol=0)
            assert copy.stride() == weight.stride()

    net.look = look
    look()
    return net


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writer", [*EXACT, *SAMPLED])
def test_the_next_call_sees_the_write(writer: str, mode: str) -> None:
    net = watched_net(mode)
    before = [weight.detach().clone() for weight in net.weights()]
    {**EXACT, **SAMPLED}[writer](net)
    net.look()
    assert not all(map(torch.equal, before, net.weights())), "the writer wrote nothing"
    casts = weight_stats().casts
    net.look()
    assert weight_stats().casts == casts, "nothing was written in between"


@pytest.mark.parametrize("mode", MODES)
def test_reads_cast_nothing(mode: str) -> None:
    net = watched_net(mode)
    casts = weight_stats().casts
    for _ in range(3):
        read(net)
        net.look()
    assert weight_stats().casts == casts


@pytest.mark.parametrize("writer", EXACT)
def test_float16_and_a_write_before_every_call(writer: str) -> None:
    net = watched_net("grad", torch.float16)
    for _ in range(3):
        EXACT[writer](net)
        net.look()


def test_the_limit_a_partial_write_behind_pytorchs_back() -> None:
    net = Net()
    binding = bind([torch.bfloat16])
    before = binding.copies([net.linear.weight])[0].clone()
    net.linear.weight.detach().numpy()[unsampled(net.linear.weight)] += 1
    assert torch.equal(binding.copies([net.linear.weight])[0], before), "docs/weights.md says this is not seen"
    invalidate(net)
    assert torch.equal(binding.copies([net.linear.weight])[0], net.linear.weight.detach().bfloat16())


@pytest.mark.parametrize("hook", [writers_module._step_begins, writers_module._step_ended])
@pytest.mark.parametrize("fused", [True, False])
def test_a_compiled_step_ticks_where_it_begins_and_ends_if_it_raises_no_version(
    hook: Callable[..., None], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, fused=fused)
    before = ticks._version
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    hook(optimizer)
    assert ticks._version == before + fused and not writers_module.step_is_running()
