"""A few words of each weight in CPU memory, to notice writers that leave no trace at all.

What takes time is to reach a place, whose page and cache line are in no cache: 40 ns. So sixteen words are read there.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

FEWEST = 4
"""Places in each weight at least, its first and its last words among them."""
MOST = 4096
"""And at most."""
STRIDE = 131072
"""Elements for each place."""
RUN = 16
"""Words of four bytes that are looked at in each place."""

_WORD = 4


class SampledAddresses(NamedTuple):
    """Addresses, in words: of runs of words, and of single words in weights that are smaller than a run."""

    runs: np.ndarray
    words: np.ndarray


def places(weight: Tensor) -> SampledAddresses:
    """Where to look at a dense weight; nowhere on other devices than the CPU.

    One place lies in each of as many parts of equal size, and varies from part to part, so that neither a column nor
    a row of a matrix goes unseen. Weights of three or more dimensions, as stacks of experts have, get one in each slice
    of the first at least.
    """
    begin = ceil(weight.data_ptr() / _WORD)
    size = (weight.data_ptr() + weight.nbytes) // _WORD - begin
    nowhere = np.empty(0, np.int64)
    if weight.device.type != "cpu" or size <= 0:
        return SampledAddresses(nowhere, nowhere)
    if size < RUN:
        return SampledAddresses(nowhere, begin + np.arange(size))
    slices = weight.shape[0] if weight.dim() > 2 else 1
    count = min(slices * ceil(max(FEWEST, prod(weight.shape) // STRIDE) / slices), MOST, ceil(size / RUN))
    within = np.random.default_rng(count).random(count)
    found = np.minimum((np.arange(count) + within) * (size / count), size - RUN).astype(np.int64)
    found[0], found[-1] = 0, size - RUN
    return SampledAddresses(begin + np.unique(found), nowhere)


class Sample:
    """The words at some places, read many times. The caller sees to it that the memory is held."""

    def __init__(self, weights: Iterable[SampledAddresses]) -> None:
        runs, words = zip(*weights, strict=True) if (weights := list(weights)) else ((), ())
        self._parts = [
            _Windows(found, size) for parts, size in ((runs, RUN), (words, 1)) if (found := _join(parts)).size
        ]
        self.places = sum(len(part.offsets) for part in self._parts)

    def read(self) -> bytes:
        """What lies there now: first all runs, then all single words."""
        if not self._parts:
            return b""
        return b"".join([part.memory[part.offsets].tobytes() for part in self._parts])


def _join(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])


class _Windows:
    """Memory from the first to the last of some places as one array of overlapping items, few of which are touched."""

    def __init__(self, places: np.ndarray, words: int) -> None:
        first = int(places.min())
        self.offsets = places - first
        self.memory = np.asarray(_Memory(first, int(self.offsets.max()) + 1, words))


class _Memory:
    """What an array keeps alive, so it must not hold the array: Python's collector sees no cycle through one."""

    def __init__(self, first: int, items: int, words: int) -> None:
        self.__array_interface__ = {
            "data": (first * _WORD, True),
            "shape": (items,),
            "strides": (_WORD,),
            "typestr": f"|V{words * _WORD}",
            "version": 3,
        }
