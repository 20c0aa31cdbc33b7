"""The limits of values, whose graph a watch reads, and what a graph takes and returns."""

import gc

import pytest
import torch
from torch import nn

from ampcompile.compiler.watched_graph import WatchedGraph, limit
from ampcompile.passes.after.record_magnitudes import WatchedValue


def value(kind: str, dtype: str) -> WatchedValue:
    return WatchedValue(kind, "aten.mm", "m", "model.py:1", False, dtype, ())


@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_is_in_range_as_long_as_it_rounds_to_a_finite_number(name: str, dtype: torch.dtype) -> None:
    most = torch.tensor(limit(value("cast", name)))
    assert most.to(dtype).isfinite() and most.nextafter(torch.tensor(torch.inf)).to(dtype).isinf()


def test_others_are_in_range_while_they_are_finite() -> None:
    assert limit(value("product", "f16")) == limit(value("op", "f32")) == torch.finfo(torch.float32).max


def test_a_graph_belongs_to_its_module_and_its_methods() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    graph = WatchedGraph(torch.device("cpu"), model.forward)
    assert graph.belongs_to(model) and graph.belongs_to(model.forward) and not graph.belongs_to(other)


def test_gradients_of_its_input_are_recorded_and_dropped() -> None:
    graph = WatchedGraph(torch.device("cpu"), nn.Linear(2, 2))
    graph.values.append(value("product", "f16"))
    (graph.slots * 3).sum().backward()
    assert graph.slots.grad is None and list(graph.kept) == [True]
    last = graph.kept[True].last()
    assert last is not None and last.magnitudes[0] == 3
    del graph
    assert gc.collect() >= 0


def test_without_gradients_it_asks_for_none() -> None:
    with torch.no_grad():
        assert not WatchedGraph(torch.device("cpu"), nn.Linear(2, 2)).slots.requires_grad
