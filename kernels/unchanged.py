"""Compare the state of tensors, storages and memory with what it was, in one call of C++ (CPU).

It reads torch's objects in C++, by the headers that torch installs. 40 weights take a microsecond, from Python fifty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import native


def available() -> bool:
    """True if the library can be built here."""
    return native.weights_function("unchanged", 1) is not None


class Unchanged:
    """Tells if tensors and storages, given by the addresses of their C++ objects, are as they were noted.

    They are if all of `tensors` are alive, the tensors in `counters` have these `versions`, the `weights` these
    `addresses`, the `storages` these numbers of `users`, and the memory holds the bytes `sampled`: first 64 at each
    address in `runs`, then 4 at each in `words`. `kept`: objects that keep the memory of those C++ objects.
    """

    def __init__(
        self,
        tensors: Sequence[int],
        counters: Sequence[int],
        versions: Sequence[int],
        weights: Sequence[int],
        addresses: Sequence[int],
        storages: Sequence[int],
        users: Sequence[int],
        runs: Sequence[int] | np.ndarray,
        words: Sequence[int] | np.ndarray,
        sampled: bytes,
        kept: Any,
    ) -> None:
        self.weights, self.sampled = list(weights), np.frombuffer(sampled, np.uint8).copy()
        groups: Any = [tensors], [counters, versions], [weights, addresses], [storages, users], [runs], [words]
        self._state, rows = native.table(*groups, also=[self.sampled.ctypes.data])
        self.versions, self._kept = rows[1][1], (kept, rows)
        self.address = self._state.ctypes.data
        """The address of the noted state, for C++: a `State`."""
        self._unchanged = native.weights_function("unchanged", 1)

    def __call__(self, weights: Sequence[int]) -> bool:
        """Return True if these are the weights, and all is as it was noted."""
        return weights == self.weights and bool(self._unchanged(self.address))
