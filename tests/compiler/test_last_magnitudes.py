"""The last call is kept, the first out of range with the one before it, and how often each value was."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.compiler.watched_graph import LastMagnitudes


def written(*calls: tuple[float, float]) -> LastMagnitudes:
    kept, clock = LastMagnitudes(torch.tensor([10.0, 100.0])), torch.zeros(1, dtype=torch.int64)
    for magnitudes in calls:
        kept.write(torch.tensor(magnitudes), clock)
    assert clock.item() == len(calls)
    return kept


def test_nothing_out_of_range() -> None:
    kept = written((1.0, 2.0), (10.0, 100.0))
    assert kept.first() is None and kept.counts.tolist() == [0, 0]
    last = kept.last()
    assert last is not None and (last.call, last.time, last.magnitudes.tolist()) == (2, 2, [10, 100])


def test_the_first_stays_with_the_call_before_it() -> None:
    for bad in (11.0, math.inf, math.nan):
        kept = written((1.0, 2.0), (bad, 3.0), (4.0, 5.0), (bad, 6.0), *[(7.0, 8.0)] * 5)
        found = kept.first()
        assert found is not None
        row, before = found
        assert (row.call, row.time, before.tolist()) == (2, 2, [1, 2])
        torch.testing.assert_close(row.magnitudes, torch.tensor([bad, 3.0]), equal_nan=True)
        assert kept.counts.tolist() == [2, 0]


def test_the_very_first_call() -> None:
    found = written((math.inf, 1.0)).first()
    assert found is not None and found[0].call == 1


def test_calls_of_several_graphs_are_in_order() -> None:
    clock = torch.zeros(1, dtype=torch.int64)
    several = [LastMagnitudes(torch.ones(1)) for _ in range(2)]
    for kept in (several[1], several[0]):
        kept.write(torch.full((1,), math.inf), clock)
    times = [found[0].time for kept in several if (found := kept.first()) is not None]
    assert times == [2, 1]


class Reads(TorchDispatchMode):
    """Raises where the host reads a number of the device's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    kept, clock = LastMagnitudes(torch.ones(2)), torch.zeros(1, dtype=torch.int64)
    with Reads():
        kept.write(torch.full((2,), math.inf), clock)
    assert kept.first() is not None
