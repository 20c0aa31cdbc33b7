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

    `tensors` must be alive, the version of each of `counters` and the address of each of `weights` that which follows,
    each storage must have so many users, and `runs` of 64 bytes and `words` of 4 must hold `sampled`, in this order.
    `kept`: objects that keep the memory of those C++ objects, and so live as long as this one.
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
        groups = (tensors,), (counters, versions), (weights, addresses), (storages, users), (runs,), (words,)
        self._arrays = [[np.array(row, dtype=np.int64) for row in group] for group in groups]
        self._weights, self._kept = list(weights), kept
        self._versions, self._sampled = self._arrays[1][1], np.frombuffer(sampled, np.uint8).copy()
        fields = (field for group in self._arrays for field in (len(group[0]), *(row.ctypes.data for row in group)))
        self._state = np.array([*fields, self._sampled.ctypes.data], dtype=np.int64)  # a `State`
        self._address = self._state.ctypes.data
        self._unchanged, self._read = native.weights_function("unchanged", 1), native.weights_function("read_state", 3)
        self._found = self._versions.copy(), self._sampled.copy()
        self._into = [found.ctypes.data for found in self._found]

    def __call__(self, weights: Sequence[int]) -> bool:
        """Return True if these are the weights, and all is as it was noted."""
        return weights == self._weights and bool(self._unchanged(self._address))

    def read(self, weights: Sequence[int]) -> tuple[list[int], bytes] | None:
        """Return the versions and the sample now; None if these aren't the weights, or anything else changed."""
        if weights != self._weights or not self._read(self._address, *self._into):
            return None
        versions, sampled = self._found
        return versions.tolist(), sampled.tobytes()

    def note(self) -> None:
        """Note what `read` returned last."""
        self._versions[:], self._sampled[:] = self._found
