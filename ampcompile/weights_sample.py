"""A few words of each weight in CPU memory, to notice writers that leave no trace at all."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from torch import Tensor

WORDS = 16
"""Words of four bytes that are looked at in each weight, the first and the last among them."""

_WORD = ctypes.sizeof(ctypes.c_uint32)
# This process's memory as one array of words; index 0 is the second word, since NumPy refuses a null pointer.
_ALL = np.ctypeslib.as_array(ctypes.cast(_WORD, ctypes.POINTER(ctypes.c_uint32)), shape=(2**45,))


class Sample:
    """Where some words lie and what they were. Look only while the memory is certain to be held."""

    def __init__(self, places: np.ndarray, words: bytes) -> None:
        self.places, self.words = places, words

    @classmethod
    def of(cls, weight: Tensor) -> Sample:
        """Words spread evenly over a dense weight; none on other devices than the CPU."""
        begin = -(-weight.data_ptr() // _WORD)
        count = (weight.data_ptr() + weight.nbytes) // _WORD - begin
        if weight.device.type != "cpu" or count <= 0:
            return cls(np.empty(0, np.int64), b"")
        places = begin - 1 + np.unique(np.linspace(0, count - 1, WORDS).astype(np.int64))
        return cls(places, _ALL[places].tobytes())

    @classmethod
    def joined(cls, samples: Iterable[Sample]) -> Sample:
        """All of these as one, as they were when they were taken."""
        samples = list(samples)
        places = np.concatenate([sample.places for sample in samples]) if samples else np.empty(0, np.int64)
        return cls(places, b"".join(sample.words for sample in samples))

    def unchanged(self) -> bool:
        """Whether the words are still what they were; about 4 us for 150 weights in the cache."""
        return _ALL[self.places].tobytes() == self.words
