"""The places of a few words of each weight in CPU memory, by which writes are seen that nothing reports.

Reaching a place whose page and cache line aren't cached takes most of the time, 40 ns. So sixteen words are read there.
"""

from __future__ import annotations

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


class Places(NamedTuple):
    """Addresses, int64, and how many bytes are read at each: a run, or a word of a weight that is smaller."""

    addresses: np.ndarray
    nbytes: int


def places(weight: Tensor) -> Places:
    """Return the addresses to sample in a dense weight; none on devices other than the CPU.

    The weight is divided into parts of equal size. Each has one place, at an offset that varies from part to part, so
    that the places of a matrix don't share a column or a row. Weights of three or more dimensions, such as stacks of
    experts, get at least one for each slice of the first, up to `MOST`.
    """
    begin = ceil(weight.data_ptr() / _WORD)
    size = (weight.data_ptr() + weight.nbytes) // _WORD - begin
    if weight.device.type != "cpu" or size <= 0:
        return Places(np.empty(0, np.int64), _WORD)
    if size < RUN:
        return Places(_WORD * (begin + np.arange(size)), _WORD)
    slices = weight.shape[0] if weight.dim() > 2 else 1
    count = min(slices * ceil(max(FEWEST, prod(weight.shape) // STRIDE) / slices), MOST, ceil(size / RUN))
    within = np.random.default_rng(count).random(count)
    offsets = np.minimum((np.arange(count) + within) * (size / count), size - RUN).astype(np.int64)
    offsets[0], offsets[-1] = 0, size - RUN
    distinct = offsets[np.diff(offsets, prepend=-1) > 0]  # they ascend; numpy.unique would import numpy.ma
    return Places(_WORD * (begin + distinct), _WORD * RUN)
