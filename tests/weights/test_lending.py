"""An optimizer's step that writes weights and their copies: what was lent to it, and what it left out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ampcompile.weights.binding import Binding
from ampcompile.weights.lending import lend
from ampcompile.weights.store import free_copies, weight_stats
from tests.weights.bindings import bind
from tests.weights.test_binding import BF16, low, nothing_left, parameters, same  # noqa: F401
from tests.weights.writers import unsampled, unseen


def test_a_fused_step_that_writes_the_copies() -> None:
    params = parameters()
    binding = bind([BF16] * 3)
    binding.copies(params)
    casts = weight_stats().casts

    def fused_step() -> int:
        written = 0
        for param in params:
            loan = lend([param])
            found = loan.tensors[0]
            new = torch.randn_like(param)
            unseen(param)[...] = new
            for copy in found:
                torch.from_dlpack(copy).copy_(new)  # raises no version
            torch.autograd.graph.increment_version([param, *found])
            written += len(found)
            loan.wrote()
        return written

    assert fused_step() == 3
    assert same(binding.copies(params), low(params))
    assert weight_stats().casts == casts, "the step brought them up to date"
    pending = F.linear(torch.randn(2, 8, dtype=BF16, requires_grad=True), binding.copies(params)[1]).sum()
    assert fused_step() == 2
    assert same(binding.copies(params), low(params))
    assert weight_stats().casts == casts + 1, "the copy that a backward waits for was not written"
    pending.backward()
    with torch.no_grad():
        params[0].add_(1)
    assert same(binding.copies(params), low(params))


def after_steps(params: list[nn.Parameter], steps: int, *graphs: Binding) -> dict:
    """What so many steps know that wrote nothing; the graphs are called after each."""
    known: dict = {}
    for _ in range(steps):
        for binding in graphs:
            binding.copies(params)
        lend(params, known).wrote()
    for binding in graphs:
        binding.copies(params)
    return known


@pytest.mark.parametrize("steps", [0, 2])
def test_while_a_fused_step_runs_no_copy_counts_as_fresh(steps: int) -> None:
    """Its kernels leave no trace, and another thread may call a graph meanwhile."""
    param = nn.Parameter(torch.zeros(300, 8))
    graphs = [bind([BF16]), bind([BF16])]
    loan = lend([param], after_steps([param], steps, *graphs))
    for step, binding in enumerate(graphs, 1):
        unseen(param)[unsampled(param)] = step
        assert same(binding.copies([param]), low([param]))
    loan.wrote()
    assert same(graphs[0].copies([param]), low([param]))


def test_copies_freed_between_a_step_s_halves() -> None:
    params = parameters(1)
    binding = bind([BF16])
    binding.copies(params)
    loan = lend(params)
    (lent,) = loan.tensors[0]
    free_copies(params)
    with torch.no_grad():
        lent.copy_(params[0].mul_(-3))
    loan.wrote()
    assert same(binding.copies(params), low(params)) and binding.copies(params)[0] is not lent


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_copy_that_was_cast_between_a_step_s_halves_is_cast_again(in_place: bool, steps: int) -> None:
    """Another thread may do so, from weights that the kernels have written in part; into another buffer or the same."""
    params = parameters(1)
    binding = bind([BF16], in_place)
    loan = lend(params, after_steps(params, steps, binding))
    (lent,) = loan.tensors[0]
    unseen(params[0])[0] += 1
    assert (binding.copies(params)[0] is lent) == in_place
    unseen(params[0])[unsampled(params[0])] += 1
    if not in_place:
        lent.copy_(params[0].detach())
    torch.autograd.graph.increment_version(params)
    loan.wrote()
    assert same(binding.copies(params), low(params))


@pytest.mark.parametrize("traced", [False, True])
def test_what_was_written_in_or_after_a_step_that_failed_is_not_lent(traced: bool) -> None:
    """The next step may be skipped, and then leaves what it was lent as it is."""
    param = nn.Parameter(torch.randn(300, 8))
    binding = bind([BF16])
    pending = F.linear(torch.randn(2, 8, dtype=BF16, requires_grad=True), binding.copies([param])[0])
    lend([param])  # and fails; this copy, which a backward waits for, it doesn't write
    if traced:
        with torch.no_grad():
            param[unsampled(param)] += 1
    else:
        unseen(param)[unsampled(param)] += 1
    del pending
    loan = lend([param])
    assert not loan.tensors[0]
    loan.wrote()
    assert same(binding.copies([param]), low([param]))


def test_what_a_step_looks_up_is_looked_up_again_when_a_copy_was_made_or_freed() -> None:
    params, known, unmoved = parameters(2), {}, object()

    def lent(params: list[nn.Parameter], same: object) -> list[int]:
        loan = lend(params, known, same)
        numbers = [len(loan.tensors[i]) for i in range(len(params))]
        loan.wrote()  # what they held already
        return numbers

    one, two = bind([BF16]), bind([BF16, BF16])
    one.copies(params[:1])
    assert lent(params, unmoved) == lent(params, unmoved) == [1, 0]
    two.copies(params)
    assert lent(params, unmoved) == lent(params, unmoved) == [1, 1]
    assert lent(params[1:], object()) == [1]
    half = bind([torch.float16])
    half.copies(params[:1])
    assert lent(params, unmoved) == lent(params, unmoved) == [2, 1]
    del half
    gc.collect()
    assert lent(params, unmoved) == [1, 1]
    params[0].data = params[0].data.clone()
    assert lent(params, unmoved) == [0, 1], "the caller is not believed about storages"


class Steps:
    """Fused steps of some weights, which keep what `lend` knows and count the Python functions that it ran."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.known, self.calls = params, {}, 0

    def lend(self):
        seen = []
        sys.setprofile(lambda frame, event, argument: seen.append(event == "call"))
        try:
            return lend(self.params, self.known)
        finally:
            sys.setprofile(None)
            self.calls = sum(seen)

    def __call__(self, between: Callable[[Steps], object] = id) -> int:
        loan, params = self.lend(), list(self.params)
        self.kept = between(self)
        written = [copy for copies in loan.tensors.values() for copy in copies]
        for i, copies in loan.tensors.items():
            unseen(params[i])[unsampled(params[i])] *= -1.5
            for copy in copies:
                torch.from_dlpack(copy).copy_(params[i].detach())  # raises no version
        torch.autograd.graph.increment_version([*params, *written])
        loan.wrote()
        return len(written)


def many(count: int) -> tuple[list[nn.Parameter], Binding]:
    params = [nn.Parameter(torch.randn(16, 16)) for _ in range(count)]
    return params, bind([BF16] * count)


def test_a_step_lends_again_with_as_much_python_for_many_weights_as_for_few() -> None:
    def calls(count: int) -> int:
        params, binding = many(count)
        steps = Steps(params)
        for _ in range(4):
            binding.copies(params)
            casts = weight_stats().casts
            assert steps() == count
        assert same(binding.copies(params), low(params)) and weight_stats().casts == casts
        return steps.calls

    assert calls(100) - calls(10) <= 2 * 90, "looking at a copy's form and place is all"


def a_write(steps: Steps) -> object:
    with torch.no_grad():
        return steps.params[0].add_(1)


CHANGES = {
    "a write": a_write,
    "an unseen write": lambda steps: unseen(steps.params[1])[...].__imul__(3),
    "another's data": lambda steps: setattr(steps.params[1], "data", torch.randn(16, 16)),
    "another tensor": lambda steps: torch.utils.swap_tensors(steps.params[1], nn.Parameter(torch.randn(16, 16))),
    "an array": lambda steps: steps.params[1].detach().numpy(),
    "a view that is kept": lambda steps: steps.params[1].detach()[3:],
    "another copy": lambda steps: (graph := bind([torch.float16] * 3), graph.copies(steps.params)),
    "copies freed": lambda steps: free_copies(steps.params),
    "fewer weights": lambda steps: steps.params.pop(),
    "another order": lambda steps: steps.params.reverse(),
    "a step that failed": lambda steps: steps.lend(),
    "a backward that waits": lambda steps: F.linear(
        torch.randn(2, 16, dtype=BF16, requires_grad=True), bind([BF16]).copies(steps.params[1:2])[0]
    ),
}


RACES = ("a write", "an unseen write", "another's data", "another tensor", "a step that failed")
"""What a user may not do while a step runs."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("between", ["steps", "halves"])
def test_what_changed_since_the_last_step_is_not_lent_as_then(change: str, between: str) -> None:
    if between == "halves" and change in RACES:
        pytest.skip("a race of the user's with the step")
    params, binding = many(3)
    steps = Steps(params)
    for _ in range(3):
        binding.copies(params)
        steps()
    binding.copies(params)
    if between == "steps":
        kept = CHANGES[change](steps)
        steps()
    else:
        steps(CHANGES[change])
        kept = steps.kept
    weights = list(steps.params)
    graph = binding if change not in ("fewer weights", "another order") else bind([BF16] * len(weights))
    for _ in range(2):
        assert same(graph.copies(weights), low(weights))
        steps()
    assert same(graph.copies(weights), low(weights))
    steps.kept = kept = None  # noqa: F841
    steps()
    assert same(graph.copies(weights), low(weights))


def test_a_copy_that_a_backward_saved_is_not_lent_again() -> None:
    params, binding = many(3)
    steps = Steps(params)
    for _ in range(3):
        binding.copies(params)
        steps()
    x = torch.randn(2, 16, dtype=BF16, requires_grad=True)
    expected = params[1].detach().to(BF16).sum(0).expand(2, 16)
    loss = F.linear(x, binding.copies(params)[1]).sum()
    assert steps() == 2
    loss.backward()
    assert torch.allclose(x.grad.float(), expected.float(), rtol=0.02, atol=0.1)
    del loss
    assert same(binding.copies(params), low(params))
    assert steps() == 3


def test_a_weight_that_takes_part_again_is_lent_too() -> None:
    params, binding = many(3)
    steps = Steps(params[:2])
    for _ in range(3):
        binding.copies(params)
        assert steps() == 2
    steps.params.append(params[2])
    binding.copies(params)
    assert steps() == 3
    assert same(binding.copies(params), low(params))


def test_what_a_step_keeps_keeps_no_copy() -> None:
    params, binding = many(3)
    steps = Steps(params)
    for _ in range(3):
        binding.copies(params)
        steps()
    del binding
    gc.collect()
    assert weight_stats().copies == 0
    assert steps() == 0
