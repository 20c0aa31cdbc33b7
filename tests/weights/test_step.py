"""Steps of ours write copies with the weights; a step that fails, or isn't alone, leaves none that counts as fresh."""

import pytest
import torch
from torch import nn

from ampcompile.weights import writable_copies
from tests.weights.bindings import Case, bind, comparisons
from tests.weights.writers import unsampled, unseen

BF16 = torch.bfloat16


def test_a_step_of_ours_writes_the_copies_and_nothing_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    found = comparisons(monkeypatch)
    for _ in range(3):
        lent = writable_copies([case.weight])
        unseen(case.weight)[...] *= 0.5
        (buffer,) = lent.buffers[0].values()
        buffer.copy_(case.weight.detach())
        torch.autograd.graph.increment_version([case.weight, buffer])
        del buffer
        lent.mark_written()
        del lent
        assert case.right() and not found


def test_a_step_that_failed_leaves_nothing_fresh() -> None:
    case = Case()
    lent = writable_copies([case.weight])
    case.right()  # within the step
    unseen(case.weight)[unsampled(case.weight)] += 1
    assert case.right()
    unseen(case.weight)[unsampled(case.weight)] += 1
    assert case.right() and lent.buffers, "cast in each call"
    writable_copies([case.weight]).mark_written()
    assert case.right()


def test_a_write_to_the_same_memory_during_a_step_leaves_it_to_the_next_call() -> None:
    case = Case()
    tied = nn.Parameter(case.weight.data)
    other = bind([BF16])
    other.copies([tied])
    lent = writable_copies([case.weight])
    case.one(tied)
    torch.autograd.graph.increment_version([case.weight])
    lent.mark_written()
    assert case.right()
