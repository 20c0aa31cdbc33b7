"""A memory knows who shares it, and notices every write by those it knows and everyone it doesn't."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampcompile.weights.freshness import Memory, memory_of
from ampcompile.weights.store import store
from tests.threads import running


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()  # weights of other tests
    yield
    store.handed_out.clear()
    store.on_last_freed.clear()
    store.set_ranges(())


def known(weight: Tensor) -> Memory:
    """The memory of a weight that a graph has read."""
    found = memory_of(weight)
    found.admit(weight)
    assert found.examine() == 0
    return found


def changed(memory: Memory, act) -> tuple[bool, bool, bool]:
    """Whether mark, doubt and the write epoch are others after an act."""
    before = store.write_epoch(), memory.mark, memory.doubt
    act()
    now = store.write_epoch()
    return memory.mark != before[1], memory.doubt != before[2], now is not before[0]


def test_a_storage_has_one_record_with_its_addresses() -> None:
    flat = torch.randn(12)
    memory = known(flat)
    memory.admit(flat[3:])
    assert memory_of(flat) is memory and memory_of(torch.randn(12)) is not memory
    assert (memory.begin, memory.end) == (flat.data_ptr(), flat.data_ptr() + 48)


def test_a_weight_is_admitted_once() -> None:
    weight = nn.Parameter(torch.randn(3), requires_grad=False)
    memory = memory_of(weight)
    doubt = memory.doubt
    sharer = memory.admit(weight)
    assert sharer is not None and memory.doubt != doubt, "a new one may have written before"
    assert not memory.trainable
    doubt = memory.doubt
    assert memory.admit(weight.requires_grad_()) is sharer and memory.doubt == doubt
    assert memory.sharers == [sharer] and memory.weights == {id(weight): sharer} and memory.trainable
    memory.admit(frozen := weight.detach())
    assert memory.trainable and not frozen.requires_grad, "one of its weights is trained"


def test_an_inference_tensor_has_no_counter_to_watch() -> None:
    with torch.inference_mode():
        weight = torch.randn(3)
    memory = memory_of(weight)
    assert memory.admit(weight) is None and memory.examine() == 1


def test_a_write_by_a_sharer_is_noticed_once() -> None:
    weight = torch.randn(3)
    memory = known(weight)
    assert changed(memory, memory.examine) == (False, False, False)
    weight.add_(1)
    assert changed(memory, memory.examine)[0]
    assert not changed(memory, memory.examine)[0]


def test_whoever_shares_it_unknown_is_counted_and_raises_a_doubt() -> None:
    weight = torch.randn(3)
    memory = known(weight)
    views = [weight.view(-1), weight.detach()]
    assert memory.examine(aliases=2) == 0
    before = memory.doubt
    assert memory.examine() == 2 and memory.doubt != before
    memory.admit(views[0])
    assert memory.examine() == 1
    views.clear()
    assert memory.examine() == 0 and len(memory.sharers) == 1 and set(memory.weights) == {id(weight)}


def test_a_sharer_that_went_elsewhere_ends_all_that_is_known() -> None:
    weight, other = torch.randn(3), torch.randn(3)
    memory = known(weight)
    alias = weight.detach()
    memory.admit(alias)
    weight.set_(other)
    assert memory.examine() == -1 and not memory.sharers and not memory.weights


def test_a_resized_storage_is_followed_and_doubted() -> None:
    weight = torch.randn(3)
    memory = known(weight)
    weight.untyped_storage().resize_(4096)
    before = memory.doubt
    memory.admit(weight)
    assert memory.end - memory.begin == 4096 and memory.begin == weight.data_ptr() and memory.doubt != before


def test_reports_change_what_they_say() -> None:
    memory = known(weight := torch.randn(3))
    assert changed(memory, memory.written) == (True, False, True)
    assert changed(memory, memory.doubted) == (False, True, True)
    assert changed(memory, store.doubt_all) == (False, True, True)
    assert changed(memory, lambda: memory.forget(weight)) == (False, True, True)
    assert not memory.sharers and not memory.weights
    memory.admit(weight)
    assert changed(memory, memory.forget_sharers) == (False, True, True)
    assert not memory.sharers and not memory.weights


def test_forgetting_one_sharer_keeps_the_others() -> None:
    weight = torch.randn(3)
    memory = known(weight)
    sharer = memory.admit(other := weight.detach())
    memory.forget(weight)
    assert memory.sharers == [sharer] and set(memory.weights) == {id(other)}


@pytest.mark.parametrize(("offset", "doubts"), [(-1, False), (0, True), (47, True), (48, False)])
def test_an_alias_that_was_handed_out_raises_a_doubt_where_it_lies(offset: int, doubts: bool) -> None:
    memory = known(weight := torch.randn(12))
    assert changed(memory, lambda: store.handed_out.append(weight.data_ptr() + offset)) == (False, doubts, doubts)
    assert not store.handed_out


def test_a_compiled_step_has_written_what_is_trained() -> None:
    trained, frozen = nn.Parameter(torch.randn(3)), torch.randn(3)
    memory, other = known(trained), known(frozen)
    mark = other.mark
    assert changed(memory, lambda: store.ticks.add_(1)) == (True, False, True)
    assert other.mark == mark
    assert changed(memory, store.write_epoch) == (False, False, False)


def test_during_a_step_nothing_is_fresh_and_its_end_tells_who_may_have_written() -> None:
    weight = torch.randn(3)
    memory = known(weight)
    weight.add_(1)
    assert changed(memory, memory.open_step)[::2] == (True, True)
    assert memory.step_open
    assert changed(memory, memory.open_step) == (True, False, True), "a step that failed may have written"
    mark = memory.mark
    assert memory.close_step() and not memory.step_open and memory.mark != mark
    view = weight.view(-1)
    memory.open_step()
    assert not memory.close_step() and not memory.step_open
    del view


def test_with_the_weight_its_record_goes_and_with_the_last_the_ranges() -> None:
    assert not store.watched()
    freed: list[str] = []
    store.on_last_freed.append(lambda: freed.append("last"))
    weights = [torch.randn(3), torch.randn(3)]
    held = [known(weight) for weight in weights]
    store.set_ranges((each.begin, each.end) for each in store.watched())
    del weights[0]
    assert store.watched() == held[1:] and store.ranges and not freed
    weights.clear()
    assert not store.watched() and not store.ranges and freed == ["last"] and not store.on_last_freed


def test_while_another_makes_copies_the_ranges_stay() -> None:
    memory = known(weight := torch.randn(3))
    store.set_ranges([(memory.begin, memory.end)])
    holds, done = threading.Event(), threading.Event()

    def make_copies() -> None:
        with store.lock:
            holds.set()
            done.wait(60)

    with running(make_copies):
        holds.wait(60)
        del memory, weight
        left = list(store.ranges)
        done.set()
    assert left


def test_the_record_of_any_tensor_is_found_where_there_is_one() -> None:
    memory = known(weight := torch.randn(3))
    view, elsewhere = weight[1:], torch.randn(3)
    assert store.find(view) is memory and store.find(elsewhere) is None
    assert store.find_in_ranges(view) is None, "outside of the ranges"
    store.set_ranges([(memory.begin, memory.end)])
    assert store.find_in_ranges(view) is memory and store.find_in_ranges(elsewhere) is None
    without = torch.eye(3).to_sparse()
    assert store.find_in_ranges(without) is None and store.find(without) is None
    assert store.find_in_ranges(torch.from_numpy(np.ones(3))) is None
