"""Compare the state of tensors, storages and memory with what it was, in one call of C++ (CPU).

It reads torch's objects in C++, by the headers that torch installs. 40 weights take a microsecond, from Python fifty.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import native


@functools.cache
def _function() -> Any:
    library = native.library("state")
    if library is None:
        return None
    function = ctypes.PyDLL(library._name).unchanged  # no other thread of Python runs meanwhile
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function


def available() -> bool:
    """True if the library can be built here."""
    return _function() is not None


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
        self._weights, self._versions, self._kept = list(weights), self._arrays[1][1], kept
        fields = (field for group in self._arrays for field in (len(group[0]), *(row.ctypes.data for row in group)))
        self._state = np.array([*fields, 0], dtype=np.int64)  # a `State`
        self._address, self._function = self._state.ctypes.data, _function()
        self.note(versions, sampled)

    def note(self, versions: Sequence[int], sampled: bytes) -> None:
        """Note other versions and another sample."""
        self._sampled = np.frombuffer(sampled, np.uint8)
        self._versions[:], self._state[-1] = versions, self._sampled.ctypes.data

    def __call__(self, weights: Sequence[int]) -> bool:
        """Return True if these are the weights, and all is as it was noted."""
        return weights == self._weights and bool(self._function(self._address))
