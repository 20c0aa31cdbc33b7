"""The last call is kept, the first out of range with the one before it, and how often each value was."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.compiler.watched_graph import LastMagnitudes


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
