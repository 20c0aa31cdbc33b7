"""Sample a few words of each weight in CPU memory, to detect writes that nothing reports.

Reaching a place whose page and cache line aren't cached takes most of the time, 40 ns. So sixteen words are read there.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

FEWEST = 4
"""Least number of places in each weight, its first and its last words among them."""
MOST = 4096
"""Greatest number of places in each weight."""
STRIDE = 131072
"""Elements for each place."""
RUN = 16
"""Words of four bytes that are read at each place."""

_WORD = 4


class SampledAddresses(NamedTuple):
    """Addresses, in words: of runs of words, and of single words in weights that are smaller than a run."""

    runs: np.ndarray
    words: np.ndarray


def places(weight: Tensor) -> SampledAddresses:
    """Return the addresses to sample in a dense weight; none on devices other than the CPU.

    The weight is divided into parts of equal size. Each has one place, at an offset that varies from part to part, so
    that the places of a matrix don't share a column or a row. Weights of three or more dimensions, such as stacks of
    experts, get at least one for each slice of the first, up to `MOST`.
    """
    begin = ceil(weight.data_ptr() / _WORD)
    size = (weight.data_ptr() + weight.nbytes) // _WORD - begin
    empty = np.empty(0, np.int64)
    if weight.device.type != "cpu" or size <= 0:
        return SampledAddresses(empty, empty)
    if size < RUN:
        return SampledAddresses(empty, begin + np.arange(size))
    slices = weight.shape[0] if weight.dim() > 2 else 1
    count = min(slices * ceil(max(FEWEST, prod(weight.shape) // STRIDE) / slices), MOST, ceil(size / RUN))
    within = np.random.default_rng(count).random(count)
    offsets = np.minimum((np.arange(count) + within) * (size / count), size - RUN).astype(np.int64)
    offsets[0], offsets[-1] = 0, size - RUN
    return SampledAddresses(begin + np.unique(offsets), empty)


class Sample:
    """Reads the words at some places many times. The caller keeps the memory alive."""

    def __init__(self, weights: Iterable[SampledAddresses]) -> None:
        runs, words = zip(*weights, strict=True) if (weights := list(weights)) else ((), ())
        self._parts = [
            _Windows(joined, size) for parts, size in ((runs, RUN), (words, 1)) if (joined := _join(parts)).size
        ]
        self.places = sum(len(part.offsets) for part in self._parts)

    def read(self) -> bytes:
        """Return the words there now: first all runs, then all single words."""
        if not self._parts:
            return b""
        return b"".join([part.memory[part.offsets].tobytes() for part in self._parts])


def _join(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])


class _Windows:
    """Memory from the first to the last of some places as one array of overlapping items, few of which are read."""

    def __init__(self, places: np.ndarray, words: int) -> None:
        first = int(places.min())
        self.offsets = places - first
        self.memory = np.asarray(_Memory(first, int(self.offsets.max()) + 1, words))


class _Memory:
    """The base of an array. It must not refer to the array: Python's garbage collector sees no cycle through one."""

    def __init__(self, first: int, items: int, words: int) -> None:
        self.__array_interface__ = {
            "data": (first * _WORD, True),
            "shape": (items,),
            "strides": (_WORD,),
            "typestr": f"|V{words * _WORD}",
            "version": 3,
        }
