"""The 16-bit copies that a step writes together with the weights: all that the scaler asks of the room of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.weights import writable_copies
from ampcompile.weights.store import store


class CopiesOfStep:
    """The copies of these parameters, all on one device, that a step may write; they count as stale until `wrote`.

    `takes`: the parameters, of float32, of which the kernels write a copy, the first, as they write the weights.
    """

    def __init__(self, params: Sequence[Tensor], takes: Sequence[bool]) -> None:
        self.by_kernel: dict[int, Tensor] = {}
        """By the parameter's index"""
        self._writable, self._params = writable_copies(params), params
        self._others: list[tuple[int, Tensor]] = []
        for i, copies in self._writable.buffers.items():  # laid out as the weight is
            if takes[i]:
                self.by_kernel[i], *copies = copies
            self._others += [(i, copy) for copy in copies]

    def wrote(self) -> None:
        """Mark the copies as fresh; call it when kernels have written, and versions of weights were raised."""
        torch.autograd.graph.increment_version(self.by_kernel.values())
        with torch.no_grad():
            for i, copy in self._others:
                copy.copy_(self._params[i])
        self._writable.mark_written()


def there_are_copies() -> bool:
    """Return True if any weight has a copy; else a step has nothing to ask."""
    return bool(store.keys)
