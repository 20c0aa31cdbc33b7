"""Copies of weights after every known way to write a weight: fresh, and cast only when needed."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.weights import invalidate, weight_stats
from ampcompile.weights.copies import TRIAL
from tests.weights.bindings import bind, comparisons
from tests.weights.programs import MODES
from tests.weights.writers import EXACT, EXPORTS, SAMPLED, Net, unsampled

WRITERS = EXACT | SAMPLED


class Watched(Net):
    """A net whose `look()` checks that the copies of its weights are up to date."""

    def __init__(self, writer: str = "") -> None:
        super().__init__(writer)
        self.binding = bind([torch.bfloat16] * 5)
        self.mode = "grad"
        self.look()

    def look(self) -> None:
        with MODES[self.mode]():
            copies = self.binding.copies(self.weights())
        for copy, weight in zip(copies, self.weights(), strict=True):
            torch.testing.assert_close(copy, weight.detach().bfloat16(), rtol=0, atol=0)
            assert copy.stride() == weight.stride()


def forward(net: Net, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
    return (
        F.linear(x, net.linear.weight),
        F.conv2d(image, net.conv.weight),
        x[:, :20] @ net.transposed.t(),
        x[:, :16] @ net.frozen,
        F.linear(x[:, :4], net.table),
    )


class Called(Net):
    """A net whose `look()` runs `compiled` and compares with eager autocast, which keeps no cast here."""

    def __init__(self, writer: str, compiled: Callable[..., Any], mode: str, tolerance: float) -> None:
        super().__init__(writer)
        self.writer, self.compiled, self.mode, self.tolerance = writer, compiled, mode, tolerance
        self.look()

    def look(self) -> None:
        x, image = torch.randn(3, 24), torch.randn(1, 3, 5, 5)
        with MODES[self.mode]():
            found = self.compiled(self, x, image)
            with torch.autocast("cpu", cache_enabled=False):
                expected = forward(self, x, image)
        for ours, eagers in zip(found, expected, strict=True):
            assert torch.allclose(ours, eagers.float(), self.tolerance, self.tolerance), f"stale: {self.writer}"


@pytest.mark.parametrize("writer", WRITERS)
def test_the_next_call_sees_each_write(writer: str) -> None:
    net = Watched(writer)
    before = [weight.detach().clone() for weight in net.weights()]
    for turn, mode in enumerate(MODES if writer in EXACT else ["grad"]):
        net.mode = mode
        WRITERS[writer](net)
        net.look()
        assert turn or not all(map(torch.equal, before, net.weights())), "the writer wrote nothing"
        casts = weight_stats().casts
        net.look()
        assert weight_stats().casts == casts, "nothing was written in between"


@pytest.mark.parametrize(
    ("lower", "mode"),
    [
        ("aot_eager", "grad"),
        pytest.param("aot_eager", "no_grad", marks=pytest.mark.slow),
        pytest.param("inductor", "grad", marks=pytest.mark.slow),
        pytest.param("inductor", "no_grad", marks=pytest.mark.slow),
    ],
)
def test_the_next_compiled_call_sees_each_write(lower: str, mode: str) -> None:
    """In one graph for all, but for writers that leave something else than a parameter in its place."""
    compiled = torch.compile(forward, backend="amp", options={"lower": lower})
    # Inductor's convolutions may round otherwise than eager's; a write changes a weight by 1 or more.
    tolerance = 2**-7 if lower == "inductor" else 0
    with torch._dynamo.config.patch(recompile_limit=len(WRITERS)):
        for name, write in WRITERS.items():
            net = Called(name, compiled, mode, tolerance)
            before = [weight.detach().clone() for weight in net.weights()]
            write(net)
            net.look()
            assert not all(map(torch.equal, before, net.weights())), f"wrote nothing: {name}"
            for _ in range(TRIAL):  # some writers leave a plain attribute in the place of a parameter
                net.look()
            casts = weight_stats().casts
            net.look()
            assert weight_stats().casts == casts, f"nothing was written in between: {name}"


@pytest.mark.parametrize("export", EXPORTS)
def test_memory_that_is_given_out_is_compared_for_as_long_as_it_is_held_and_once_more(export: str) -> None:
    weight, binding = torch.randn(3072, 768), bind([torch.bfloat16])  # large: a sample sees little of it
    binding.copies([weight])

    def look(compared: int) -> None:
        assert comparisons(lambda: binding.copies([weight])) == compared
        assert torch.equal(binding.copies([weight])[0], weight.bfloat16())

    def write(memory: Any) -> None:
        memory.reshape(weight.shape)[1001, 77] += 1

    look(0)
    alias = EXPORTS[export](weight)
    for _ in range(2):
        look(1)
        write(alias)
        look(1)
    write(alias)
    del alias
    look(1)
    look(0)
    write(EXPORTS[export](weight))  # comes and goes between two calls
    look(1)
    casts = weight_stats().casts
    EXPORTS[export](weight).sum()  # for a log
    look(1)
    look(0)
    assert weight_stats().casts == casts


def test_the_limit_a_partial_write_behind_pytorchs_back() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(24, 18))
    weight, binding = net[0].weight, bind([torch.bfloat16])
    before = binding.copies([weight])[0].clone()
    row, column = unsampled(weight)
    ctypes.memset(weight.data_ptr() + 4 * (24 * row + column), 0x3C, 4)
    assert torch.equal(binding.copies([weight])[0], before), "docs/weights.md says this is not seen"
    invalidate(net)
    assert torch.equal(binding.copies([weight])[0], weight.detach().bfloat16())
