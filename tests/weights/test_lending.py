"""An optimizer's step that writes weights and their copies: what was lent to it, and what it left out."""

import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

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


def test_while_a_fused_step_runs_no_copy_counts_as_fresh() -> None:
    """Its kernels leave no trace, and another thread may call a graph meanwhile."""
    param = nn.Parameter(torch.zeros(300, 8))
    graphs = [bind([BF16]), bind([BF16])]
    for binding in graphs:
        binding.copies([param])
    loan = lend([param])
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


@pytest.mark.parametrize("in_place", [False, True])
def test_a_copy_that_was_cast_between_a_step_s_halves_is_cast_again(in_place: bool) -> None:
    """Another thread may do so, from weights that the kernels have written in part; into another buffer or the same."""
    params = parameters(1)
    binding = bind([BF16], in_place)
    binding.copies(params)
    loan = lend(params)
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
