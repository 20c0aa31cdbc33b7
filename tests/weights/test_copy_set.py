"""A set of copies is fresh while nothing that could have written a weight has happened, and not one call longer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcompile.kernels import unchanged
from ampcompile.weights.copies import copy_of, refresh
from ampcompile.weights.copy_set import CopySet
from ampcompile.weights.freshness import memory_of
from ampcompile.weights.spec import Form
from ampcompile.weights.store import store
from tests.weights.writers import unsampled

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=[True, False], ids=["C++", "Python"])
def compared_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare states in C++, and as on a machine without a compiler."""
    if not request.param:
        monkeypatch.setattr(unchanged, "available", lambda: False)


def made(weights: list[Tensor]) -> CopySet:
    """A set of fresh copies, as a binding makes it."""
    now = store.write_epoch()
    members = [copy_of(weight, Form(BF16)) for weight in weights]
    for copy, weight in zip(members, weights, strict=True):
        copy.memory.admit(weight)
    for copy in members:
        copy.memory.examine()
    refresh([(copy, weight, True) for copy, weight in zip(members, weights, strict=True)], (), {})
    return CopySet(list(map(id, weights)), weights, members, [None] * len(weights), now, None, {})


def weights() -> list[Tensor]:
    return [torch.randn(5, 3), torch.randn(7)]


WRITES: dict[str, Callable[[list[Tensor]], object]] = {
    "by torch": lambda found: found[1].add_(1),
    "by numpy, where a sample looks": lambda found: found[1].numpy().__setitem__(0, 9.0),
    "reported": lambda found: memory_of(found[0]).written(),
    "doubted": lambda found: memory_of(found[0]).doubted(),
    "by an alias that was handed out": lambda found: store.handed_out.append(found[0].data_ptr()),
    "by a tensor that nobody knows": lambda found: found.append(found[0].view(-1)),
}


def test_a_new_set_is_fresh_and_gives_its_copies() -> None:
    found = weights()
    known = made(found)
    for _ in range(2):
        assert known.fresh(found) and not known.gone()
        forms = known.forms()
        assert [form.dtype for form in forms] == [BF16] * 2
        assert all(torch.equal(form, weight.to(BF16)) for form, weight in zip(forms, found, strict=True))


@pytest.mark.parametrize("write", WRITES)
def test_after_a_write_it_is_not_fresh(write: str) -> None:
    found = weights()
    known = made(found)
    WRITES[write](found)
    assert not known.fresh(found[:2])


def test_a_weight_that_moved_or_is_another_is_not_fresh() -> None:
    found = weights()
    known = made(found)
    assert not known.fresh([found[0], found[1].clone()])
    with torch.inference_mode():
        inference = torch.randn(7)
    assert not known.fresh([found[0], inference])


@pytest.mark.parametrize(
    "act", [lambda sharer: sharer[0][unsampled(sharer[0])].add_(1), list.clear], ids=["written", "freed"]
)
def test_a_known_sharer_that_no_graph_of_ours_reads(act: Callable[[list[Tensor]], object]) -> None:
    found = [torch.randn(40, 30), torch.randn(7)]
    sharer = [found[0].data]  # which has a version of its own
    shared = memory_of(found[0])  # lives as long as somebody knows it
    shared.admit(sharer[0])
    known = made(found)
    assert known.fresh(found)
    act(sharer)
    assert not known.fresh(found)


def test_what_was_forgotten_or_freed_is_fresh_for_no_other_call() -> None:
    found = weights()
    known, other = made(found), made(found)
    known.forget()
    other.free()
    assert not known.fresh(found) and not other.fresh(found)


def test_a_set_is_gone_with_one_of_its_weights() -> None:
    found = weights()
    known = made(found)
    del found[1]
    assert known.gone()


def test_each_set_counts_as_a_reader_of_its_copies_while_it_lives() -> None:
    found = weights()
    first, second = made(found), made(found[:1])
    (copy, other) = first.members
    assert (copy.readers[None], other.readers[None]) == (2, 1)
    del second
    assert copy.readers[None] == 1
    del first
    assert (copy.readers[None], other.readers[None]) == (0, 0)


def test_tied_slots_are_one_memory_and_one_copy() -> None:
    weight = torch.randn(5)
    known = made([weight, weight])
    assert known.members[0] is known.members[1] and len(known.memories) == 1
    assert known.members[0].readers[None] == 1 and known.fresh([weight, weight])
