"""A few words of each weight in CPU memory, to notice writers that leave no trace at all."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
from torch import Tensor

FEWEST = 16
"""Words of four bytes that are looked at in each weight at least, the first and the last among them."""
MOST = 4096
"""And at most."""
STRIDE = 8192
"""One of so many elements is looked at."""

_WORD = 4


def places(weight: Tensor) -> np.ndarray:
    """The addresses of words to look at in a dense weight, in words; none on other devices than the CPU.

    One lies in each of as many parts of equal size, at a place that varies, so that neither a column nor a row of a
    matrix goes unseen. Weights of three or more dimensions, as stacks of experts have, get one in each slice of the
    first at least.
    """
    begin = ceil(weight.data_ptr() / _WORD)
    size = (weight.data_ptr() + weight.nbytes) // _WORD - begin
    if weight.device.type != "cpu" or size <= 0:
        return np.empty(0, np.int64)
    slices = weight.shape[0] if weight.dim() > 2 else 1
    count = min(slices * ceil(max(FEWEST, prod(weight.shape) // STRIDE) / slices), MOST, size)
    within = np.random.default_rng(count).random(count)
    found = ((np.arange(count) + within) * (size / count)).astype(np.int64)
    found[0], found[-1] = 0, size - 1
    return begin + np.unique(found)


class Sample:
    """Words at some places, read many times. The caller sees to it that the memory is held."""

    def __init__(self, places: np.ndarray) -> None:
        first, last = (int(places.min()), int(places.max())) if len(places) else (1, 0)
        self.places = places
        self._offsets = places - first
        # From the first place to the last as one array, of which only the places are touched.
        self.__array_interface__ = {
            "data": (first * _WORD, True),
            "shape": (last - first + 1,),
            "typestr": "=u4",
            "version": 3,
        }
        self._memory = np.asarray(self)

    def read(self) -> bytes:
        """What lies there now."""
        return self._memory[self._offsets].tobytes()
