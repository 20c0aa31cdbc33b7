"""Sharers that are tensors in Python are found and known; those that aren't are reported, at every search."""

import gc
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ampcompile.weights import freshness
from ampcompile.weights.freshness import Memory, memory_of, unexplained
from ampcompile.weights.store import store


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()  # weights of other tests
    monkeypatch.setattr(store, "search_seconds", freshness._MOST)
    monkeypatch.setattr(store, "searched_at", time.monotonic())
    yield
    store.set_ranges(())


def known(weight: Tensor) -> Memory:
    found = memory_of(weight)
    found.admit(weight)
    store.set_ranges((each.begin, each.end) for each in store.watched())
    return found


def test_views_are_found_and_known() -> None:
    weight = torch.randn(4)
    found = known(weight)
    kept = {"state": [weight.view(2, 2)], "parameter": torch.nn.Parameter(weight)}
    alias = weight.detach()
    assert found.examine(aliases=1) == 2
    assert unexplained([found], [alias]) == []
    assert {sharer.key for sharer in found.sharers} == {id(weight), id(kept["state"][0]), id(kept["parameter"])}
    assert found.examine(aliases=1) == 0


def test_each_alias_of_the_caller_counts_for_its_own_memory() -> None:
    first, second = torch.randn(4), torch.randn(4)
    found, other = known(first), known(second)
    aliases = [first.detach(), second.detach(), first.detach()]
    assert unexplained([found, other, found], aliases) == []
    assert len(found.sharers) == len(other.sharers) == 1, "the caller's are no sharers"


def test_what_only_a_backward_holds_is_not_found() -> None:
    weight, other = torch.randn(3, 4), torch.randn(4)
    found, innocent = known(weight), known(other)
    waiting = torch.nn.functional.linear(torch.randn(2, 4, requires_grad=True), weight)  # saves a view made in C++
    doubt = found.doubt
    for _ in range(2):
        assert unexplained([found, innocent], [weight.detach(), other.detach()]) == [found]
    assert found.doubt != doubt and len(found.sharers) == 1
    del waiting
    assert unexplained([found], [weight.detach()]) == []


@pytest.mark.parametrize("holds", ["an array", "a function's variable", "a list"])
def test_a_tensor_that_an_array_holds_is_no_sharer_that_can_be_watched(holds: str) -> None:
    weight = torch.randn(4)
    found, kept = known(weight), [weight.numpy() if holds == "an array" else weight.view(2, 2)]
    variable = kept.pop() if holds == "a function's variable" else None
    weight.numpy()  # from here on there may be arrays
    for _ in range(2):
        assert unexplained([found], [weight.detach()]) == ([] if holds == "a list" else [found])
    assert found.exports() == (holds != "a list")
    del variable
    kept.clear()
    assert unexplained([found], [weight.detach()]) == [] and not found.exports()


def test_only_an_unknown_sharer_that_lasts_is_warned_of_and_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = known(weight := torch.randn(3, 4))
    for seconds, warnings in (60.0, 0), (0.0, 1):
        monkeypatch.setattr(freshness, "_LASTS", (8, seconds))
        for calls in (1, 7, 7, 30):  # another thread's are over soon
            passing = torch.nn.functional.linear(torch.randn(2, 4, requires_grad=True), weight)
            for _ in range(calls):
                assert unexplained([found], [weight.detach()]) == [found]
            del passing
            assert unexplained([found], [weight.detach()]) == []
            assert len(caplog.records) == (warnings if calls > 7 else 0)
    assert "a weight of 48 bytes is compared or cast at every call" in caplog.text


def test_objects_of_old_are_searched_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4)
    found = known(weight)
    kept = [weight.view(4)]
    gc.collect()  # all that is left is of old
    monkeypatch.setattr(store, "search_seconds", -1.0)
    assert unexplained([found], [weight.detach()]) == [found]
    monkeypatch.setattr(store, "search_seconds", 0.5)
    assert unexplained([found], [weight.detach()]) == []
    assert store.search_seconds < 0.5, "the search is counted"
    assert memory_of(kept[0]) is found and len(found.sharers) == 2


@pytest.mark.parametrize(("seconds", "searched"), [(41.0, True), (39.0, False)])
def test_searches_may_take_a_twentieth_of_the_process_s_time(
    seconds: float, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(4)
    found = known(weight)
    kept = [weight.view(4)]
    gc.collect()
    monkeypatch.setattr(store, "search_seconds", -2.0)
    monkeypatch.setattr(store, "searched_at", time.monotonic() - seconds)
    assert unexplained([found], [weight.detach()]) == ([] if searched else [found])
    del kept


def test_no_more_than_a_second_of_searches_is_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = known(weight := torch.randn(4))
    monkeypatch.setattr(store, "searched_at", time.monotonic() - 1e6)
    passing = torch.nn.functional.linear(torch.randn(2, 4, requires_grad=True), weight)
    assert unexplained([found], [weight.detach()]) == [found] and store.search_seconds < freshness._MOST
    del passing


def test_without_time_for_a_search_what_arrays_may_hold_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.from_numpy(np.zeros(4, np.float32))
    found = known(weight := torch.nn.Parameter(value))
    monkeypatch.setattr(store, "search_seconds", -1.0)
    monkeypatch.setattr(
        freshness, "_with_hidden_holders", lambda tensors: pytest.fail("searched") if tensors else set()
    )
    assert unexplained([found], [weight.detach()]) == [found]
    assert len(found.sharers) == 1 and not found.exported
    del value


def test_nothing_is_searched_where_nobody_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4)
    found = known(weight)
    monkeypatch.setattr(gc, "get_objects", lambda generation: pytest.fail("searched"))
    assert unexplained([found], [weight.detach()]) == []
