"""Sample a few words of each weight in CPU memory, to detect writes that nothing reports.

Reaching a place whose page and cache line aren't cached takes most of the time, 40 ns. So sixteen words are read there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from math import ceil, prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ampcompile.kernels import native

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
    distinct = offsets[np.diff(offsets, prepend=-1) > 0]  # they ascend; numpy.unique would import numpy.ma
    return SampledAddresses(begin + distinct, empty)


class Sample:
    """Reads the words at some places many times. The caller keeps the memory alive.

    `runs` and `words`: addresses of runs of words, and of single words; int64.
    """

    def __init__(self, weights: Iterable[SampledAddresses]) -> None:
        all_places = list(weights)
        self.runs, self.words = (_bytes_at([each[i] for each in all_places]) for i in range(2))
        self.places = len(self.runs) + len(self.words)
        self._read = native.weights_function("read_words", 5) if self.places else None
        self.nbytes = _WORD * (RUN * len(self.runs) + len(self.words))
        self._copied = ctypes.create_string_buffer(self.nbytes)
        rows = (len(self.runs), self.runs.ctypes.data, len(self.words), self.words.ctypes.data)
        self._arguments = *rows, ctypes.addressof(self._copied)

    def read(self) -> bytes:
        """Return the words there now: first all runs, then all single words."""
        if self._read is None:
            return self._read_without_compiler()
        self._read(*self._arguments)
        return self._copied.raw

    def _read_without_compiler(self) -> bytes:
        parts = (self.runs, RUN * _WORD), (self.words, _WORD)
        return b"".join(ctypes.string_at(at, size) for addresses, size in parts for at in addresses.tolist())


def _bytes_at(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts]) * _WORD
