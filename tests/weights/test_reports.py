"""Copies of weights after every known way to write a weight, and after reads: fresh, and cast only when needed."""

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.weights import Binding, invalidate, reports, weight_stats
from ampcompile.weights.copies import TRIAL
from tests.weights.bindings import bind, comparisons
from tests.weights.writers import EXACT, EXPORTS, SAMPLED, Net, read, unsampled, unseen

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def watched_net(mode: str, dtype: torch.dtype = torch.bfloat16, writer: str = "") -> Net:
    """A net whose `look()` checks that the copies of its weights are up to date."""
    net = Net(writer)
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


@pytest.mark.parametrize(
    ("mode", "dtype"), [("grad", torch.float16), ("no_grad", torch.bfloat16), ("inference_mode", torch.float16)]
)
@pytest.mark.parametrize("writer", [*EXACT, *SAMPLED])
def test_the_next_call_sees_each_write(writer: str, mode: str, dtype: torch.dtype) -> None:
    net = watched_net(mode, dtype, writer)
    before = [weight.detach().clone() for weight in net.weights()]
    for turn in range(3 if writer in EXACT else 1):
        {**EXACT, **SAMPLED}[writer](net)
        net.look()
        assert turn or not all(map(torch.equal, before, net.weights())), "the writer wrote nothing"
        casts = weight_stats().casts
        net.look()
        assert weight_stats().casts == casts, "nothing was written in between"


def forward(net: Net, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
    return (
        F.linear(x, net.linear.weight),
        F.conv2d(image, net.conv.weight),
        x[:, :20] @ net.transposed.t(),
        x[:, :16] @ net.frozen,
        F.linear(x[:, :4], net.table),
    )


def compiled_net(lower: str, mode: str, writer: str) -> Net:
    """A net whose `look()` calls it and compares with eager autocast, which keeps no cast here."""
    net, cached = Net(writer), torch.compile(forward, backend="amp", options={"lower": lower})

    def look() -> None:
        x, image = torch.randn(3, 24), torch.randn(1, 3, 5, 5)
        with MODES[mode]():
            found = cached(net, x, image)
            with torch.autocast("cpu", cache_enabled=False):
                expected = forward(net, x, image)
        for ours, eagers in zip(found, expected, strict=True):
            # Inductor's convolutions may round otherwise than eager's; a write changes a weight by 1 or more.
            assert torch.allclose(ours, eagers.float(), *([2**-7, 2**-7] if lower == "inductor" else [0, 0]))

    net.look = look
    look()
    return net


@pytest.mark.parametrize(
    ("lower", "mode"),
    [
        ("aot_eager", "grad"),
        pytest.param("aot_eager", "no_grad", marks=pytest.mark.slow),
        pytest.param("inductor", "grad", marks=pytest.mark.slow),
        pytest.param("inductor", "no_grad", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("writer", [*EXACT, *SAMPLED])
def test_the_next_compiled_call_sees_the_write(writer: str, lower: str, mode: str) -> None:
    net = compiled_net(lower, mode, writer)
    before = [weight.detach().clone() for weight in net.weights()]
    {**EXACT, **SAMPLED}[writer](net)
    net.look()
    assert not all(map(torch.equal, before, net.weights())), "the writer wrote nothing"
    for _ in range(TRIAL):  # some writers leave a plain attribute in the place of a parameter
        net.look()
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


WRITES: dict[str, Callable[[Any], object]] = {
    "a row": lambda alias: alias[7].__imul__(2),
    "a slice": lambda alias: alias[1:90:3, 5:40].__iadd__(1),
    "an element": lambda alias: alias.__setitem__((1001, 77), 5.0),
}


def large() -> tuple[torch.Tensor, Callable[[], bool]]:
    """A weight that a sample sees little of, and whether a call reads what it holds."""
    weight, binding = torch.randn(3072, 768), bind([torch.bfloat16])
    return weight, lambda: torch.equal(binding.copies([weight])[0], weight.bfloat16())


def two_dimensional(alias: Any, weight: torch.Tensor) -> Any:
    return alias.reshape(weight.shape) if alias.ndim == 1 else alias


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("export", EXPORTS)
def test_a_write_through_memory_that_was_given_out(export: str, write: str) -> None:
    weight, right = large()
    assert right()
    alias = two_dimensional(EXPORTS[export](weight), weight)
    for _ in range(2):  # for as long as it is there
        assert right()
        WRITES[write](alias)
    assert right()
    WRITES[write](alias)
    del alias
    assert right(), "gone before the call"
    WRITES[write](two_dimensional(EXPORTS[export](weight), weight))
    assert right(), "come and gone before the call"


@pytest.mark.parametrize("export", EXPORTS)
def test_what_was_given_out_and_is_gone_costs_one_comparison(export: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, binding = torch.randn(40, 30), bind([torch.bfloat16])
    compared = comparisons(monkeypatch)
    binding.copies([weight])
    casts, alias = weight_stats().casts, EXPORTS[export](weight)
    for calls in range(3):
        assert len(compared) == calls
        binding.copies([weight])
    del alias
    for _ in range(3):
        binding.copies([weight])
    assert len(compared) == 4 and weight_stats().casts == casts
    EXPORTS[export](weight).sum()  # for a log
    for _ in range(3):
        binding.copies([weight])
    assert len(compared) == 5 and weight_stats().casts == casts


def test_the_limit_a_partial_write_behind_pytorchs_back() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(24, 18))
    weight, binding = net[0].weight, bind([torch.bfloat16])
    before = binding.copies([weight])[0].clone()
    row, column = unsampled(weight)
    ctypes.memset(weight.data_ptr() + 4 * (24 * row + column), 0x3C, 4)
    assert torch.equal(binding.copies([weight])[0], before), "docs/weights.md says this is not seen"
    invalidate(net)
    assert torch.equal(binding.copies([weight])[0], weight.detach().bfloat16())


def into_a_slice_of_the_storage(weight: torch.Tensor, row: int, column: int) -> None:
    begin = 4 * (64 * row + column)
    weight.untyped_storage()[begin : begin + 4].fill_(0x3C)


def by_a_kept_storage(weight: torch.Tensor, row: int, column: int) -> None:
    storages.append(weight.untyped_storage())
    bind([torch.bfloat16]).copies([weight])
    storages[0][4 * (64 * row + column) + 3] = 64


storages: list[torch.UntypedStorage] = []


@pytest.mark.parametrize("write", [into_a_slice_of_the_storage, by_a_kept_storage])
def test_a_write_of_one_place_that_no_sample_covers_is_seen(write: Callable[..., None]) -> None:
    weight, binding = torch.randn(64, 64), bind([torch.bfloat16])
    before = binding.copies([weight])[0].clone()
    write(weight, *unsampled(weight))
    assert torch.equal(binding.copies([weight])[0], weight.bfloat16()) and not torch.equal(weight.bfloat16(), before)


class OfAnyKind(torch.optim.SGD):
    """Nobody knows what its step writes."""


def hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


SGD = torch.optim.SGD
# Whose step comes just before a write to the weight that nothing else reports, and who has stepped the weight.
DOUBTFUL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any] | None]] = {
    "that of an unknown class": (lambda p: OfAnyKind(p, 0.1), lambda p: SGD(p, 0.1)),
    "one with a hook": (lambda p: hooked(SGD(p, 0.1)), lambda p: SGD(p, 0.1)),
    "torch's own, where nobody steps the weight": (lambda p: SGD(p, 0.1), None),
    "torch's own, where one of an unknown class steps the weight": (lambda p: SGD(p, 0.1), lambda p: OfAnyKind(p, 0.1)),
    "torch's own, where one with a hook steps the weight": (lambda p: SGD(p, 0.1), lambda p: hooked(SGD(p, 0.1))),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_a_step_may_have_written_what_another_optimizer_does_not_surely_own(case: str) -> None:
    steps, owns = DOUBTFUL[case]
    (weight, other), binding = two_trained(), bind([torch.bfloat16])
    binding.copies([weight])
    if owner := owns and owns([weight]):
        owner.step()
    binding.copies([weight])
    steps([other]).step()
    unseen(weight)[unsampled(weight)] += 1
    assert torch.equal(binding.copies([weight])[0], weight.detach().bfloat16())


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_leaves_the_copies_of_what_another_steps(fused: bool) -> None:
    (mine, its), binding, its_binding = two_trained(), bind([torch.bfloat16]), bind([torch.bfloat16])
    first, second = SGD([mine], lr=0.1, fused=fused), SGD([its], lr=0.1, fused=fused)
    binding.copies([mine])
    first.step()
    for optimizer, stepped, kept in ((second, 1, 0), (first, 0, 1), (second, 1, 0)):
        before = [binding.copies([mine])[0].clone(), its_binding.copies([its])[0].clone()]
        casts = weight_stats().casts
        optimizer.step()
        after = [binding.copies([mine])[0], its_binding.copies([its])[0]]
        assert weight_stats().casts == casts + 1, "one of the two"
        assert not torch.equal(after[stepped], before[stepped]) and torch.equal(after[kept], before[kept])
        assert torch.equal(after[0], mine.detach().bfloat16()) and torch.equal(after[1], its.detach().bfloat16())
    second.add_param_group({"params": [mine]})
    binding.copies([mine])
    second.step()
    assert torch.equal(binding.copies([mine])[0], mine.detach().bfloat16()), "a parameter of both"


def two_trained() -> list[torch.nn.Parameter]:
    """Two parameters, and gradients that have an optimizer write where no sample looks."""
    params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    for param in params:
        param.grad = torch.zeros(64, 64)
        param.grad[unsampled(param)] = 1
    return params


def test_a_step_without_hooks_is_under_way_until_it_ends_or_fails() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    reports.watch_writers()

    def step(fails: bool) -> None:
        with reports.untold_step(optimizer):
            reports.drop_failed_steps()
            assert reports.in_step(optimizer)
            if fails:
                raise KeyError

    step(fails=False)
    assert not reports.in_step(optimizer)
    with pytest.raises(KeyError):
        step(fails=True)
    assert reports.in_step(optimizer), "until somebody asks"
    reports.drop_failed_steps()
    assert not reports.in_step(optimizer)
