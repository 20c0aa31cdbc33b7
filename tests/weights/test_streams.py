"""Copies on several streams, and in CUDA graphs that the user captures; streams and graphs are played on the CPU."""

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ampcompile.weights import Binding, free_copies, weight_stats, writable_copies
from ampcompile.weights.store import store
from tests.weights.bindings import bind
from tests.weights.streams import Streams, rounded, streams, words

__all__ = ["streams"]


class Model:
    """Two weights, and what stands for a compiled graph: it reads all numbers of their copies."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.params = [nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(20))]
        self.binding: Binding = bind([torch.bfloat16] * 2)

    def call(self, stream: int, binding: Binding | None = None) -> list[np.ndarray]:
        """What a call on a stream will have read."""
        found: list[np.ndarray] = []
        with self.streams.use(stream):
            read = [(copy.data_ptr(), copy.numel()) for copy in (binding or self.binding).copies(self.params)]
            self.streams.launch(lambda: found.extend(words(at, count, np.int16).copy() for at, count in read))
        return found

    def right(self) -> list[np.ndarray]:
        """What the copies should hold."""
        return [rounded(param.data_ptr(), param.numel()) for param in self.params]

    def wait(self, waiting: int, before: int) -> None:
        """What a user writes who updates weights on another stream."""
        event = self.streams.event()
        event.record(before)
        event.wait(waiting)

    def update(self, count: int = 2) -> None:
        with torch.no_grad():
            for param in self.params[:count]:
                param.mul_(-2)


def called_everywhere(streams: Streams) -> Model:
    """A model whose copies are there for three streams."""
    model = Model(streams)
    for stream in (1, 2, 3):
        model.call(stream)
    streams.finish()
    return model


def unsampled(param: torch.Tensor) -> None:
    """A reported write where no look looks."""
    with torch.no_grad():
        param.view(-1)[-1] += 1


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("order", [(3, 2, 1), (2, 3, 1), (2, 1, 3), (1, 2, 3)])
def test_each_call_waits_for_the_cast_of_its_own_weights(streams: Streams, order: tuple[int, ...]) -> None:
    first, second = Model(streams), Model(streams)
    first.call(1)
    second.call(2)
    calls = [(model, model.call(stream)) for model in (first, second) for stream in (1, 2, 3)]
    streams.finish(*order)
    assert all(same(found, model.right()) for model, found in calls)
    first.update()
    first.call(3)
    calls = [(model, model.call(stream)) for model in (second, first) for stream in (2, 1)]
    streams.finish(*order)
    assert all(same(found, model.right()) for model, found in calls)


def test_a_call_waits_for_nobody_elses_cast(streams: Streams) -> None:
    first, second = Model(streams), Model(streams)
    first.call(1)
    found = second.call(2)
    while streams.step(2):
        pass
    assert same(found, second.right()), "stream 1 has done nothing yet"


def test_memory_waits_for_every_stream_that_used_it(streams: Streams) -> None:
    model = Model(streams)
    model.call(1)
    for stream in (2, 1, 3):
        model.wait(stream, 1)
        model.update()
        model.call(stream)  # casts in place, in memory that is the first stream's
    places = [copy.data_ptr() for copy in model.binding.copies(model.params)]
    assert [streams.kept[place] for place in places] == [{1, 2, 3}] * 2
    model.call(4)  # casts nothing
    assert [streams.kept[place] for place in places] == [{1, 2, 3, 4}] * 2


def test_a_step_that_may_be_skipped_follows_the_cast(streams: Streams) -> None:
    model = called_everywhere(streams)
    unsampled(model.params[0])
    model.call(1)
    with streams.use(2):
        lent = writable_copies(model.params)
        assert len(lent.by_kernel) == len(model.params)
        lent.mark_written()  # the device decided to write nothing
    found = model.call(3)
    streams.finish(3, 2, 1)
    assert same(found, model.right())


def test_a_cast_follows_the_one_before(streams: Streams) -> None:
    model = called_everywhere(streams)
    model.update(1)
    model.call(1)  # uploads a table of one weight
    assert model.params[0].data is not model.params[0]  # a doubt, which a GPU's host can't resolve by a comparison
    found = model.call(2)
    streams.finish(2, 1)  # fails there
    assert same(found, model.right())


def test_a_captured_call_casts_at_each_replay_into_memory_of_its_own(streams: Streams) -> None:
    model = Model(streams)
    model.call(1)
    streams.finish()
    with streams.capture() as graph, streams.use(7):
        own = model.binding.copies(model.params)  # held by the graph's memory
    shared = model.binding.copies(model.params)
    assert not {copy.data_ptr() for copy in own} & {copy.data_ptr() for copy in shared}
    assert all(copy.requires_grad is False and copy.grad_fn is None for copy in own)
    streams.finish()
    before = [copy.clone() for copy in shared]
    for _ in range(2):
        model.update()
        for act in graph:
            act()
        assert same([words(c.data_ptr(), c.numel(), np.int16) for c in own], model.right())
    assert all(map(torch.equal, shared, before)), "a backward may wait for it"
    del shared
    found = model.call(1)
    streams.finish()
    assert same(found, model.right())


def test_what_is_captured_outlives_the_graph_and_a_copy_that_moves(streams: Streams) -> None:
    model = Model(streams)
    model.call(1)
    with streams.capture() as graph, streams.use(7):
        own = model.binding.copies(model.params)
    x = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    waiting = model.binding.copies(model.params)[0] @ x
    model.update()
    moved = model.call(1)
    streams.finish()
    assert same(moved, model.right())
    del waiting, model.binding
    gc.collect()
    assert weight_stats().copies == 0
    model.update()
    for act in graph:
        act()
    assert same([words(c.data_ptr(), c.numel(), np.int16) for c in own], model.right())


def test_tied_weights_have_one_copy_in_a_capture_and_a_first_call_may_be_one(streams: Streams) -> None:
    weight = nn.Parameter(torch.randn(5))
    binding = bind([torch.bfloat16] * 3)
    with streams.capture():
        first, tied, other = binding.copies([weight, weight, nn.Parameter(torch.randn(5))])
    assert first is tied and other is not first
    assert weight_stats().copies == 0


def test_copies_that_a_captured_step_writes_stay_where_they_are(streams: Streams) -> None:
    model = Model(streams)
    model.call(1)
    streams.finish()
    with streams.capture(), streams.use(7):
        lent = writable_copies(model.params)
        places = [copy.data_ptr() for copy, _ in lent.by_kernel.values()]
        lent.mark_written()
        del lent
    assert len(places) == 2
    x = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    waiting = (model.binding.copies(model.params)[0] @ x).sum()
    streams.finish()
    model.update()
    found = model.call(1)
    streams.finish()
    assert same(found, model.right())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()
    del waiting
    free_copies(model.params)
    del model.binding
    gc.collect()
    assert weight_stats().copies == 2
    assert [copy.data_ptr() for copy in bind([torch.bfloat16] * 2).copies(model.params)] == places
    memory = weakref.ref(model.params[0].untyped_storage())
    model.params.clear()
    assert memory() is None and weight_stats().copies == 0 and not store.captured


def test_a_call_runs_the_same_lines_for_many_weights_as_for_few(streams: Streams) -> None:
    """After a call, after a step that wrote the copies on the same stream, and after an order with another one."""

    def lines(count: int) -> list[int]:
        params = [nn.Parameter(torch.randn(2, 2)) for _ in range(count)]
        binding, other = bind([torch.bfloat16] * count), Model(streams)
        other.binding, other.params = binding, params
        binding.copies(params)
        found = [lines_of(lambda: binding.copies(params))]
        lent = writable_copies(params)
        assert len(lent.by_kernel) == count
        torch.autograd.graph.increment_version(params)
        lent.mark_written()
        found.append(lines_of(lambda: binding.copies(params)))
        other.call(2)
        with streams.use(2):
            found.append(lines_of(lambda: binding.copies(params)))
        found.append(lines_of(lambda: binding.copies(params)))
        return found

    few, many = lines(3), lines(60)
    assert few == many and len(set(few)) == 1 and few[0] < 30


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of the package run in a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "ampcompile" in frame.f_globals.get("__name__", "") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
