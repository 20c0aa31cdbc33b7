"""A few words of each weight in CPU memory, to notice writers that leave no trace at all."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

WORDS = 16
"""Words of four bytes that are looked at in each weight, the first and the last among them."""

_WORD = ctypes.sizeof(ctypes.c_uint32)
# This process's memory as one array of words; index 0 is the second word, since NumPy refuses a null pointer.
_MEMORY = np.ctypeslib.as_array(ctypes.cast(_WORD, ctypes.POINTER(ctypes.c_uint32)), shape=(2**45,))


def places(weight: Tensor) -> np.ndarray:
    """Where to look at a dense weight: words spread evenly over it; none on other devices than the CPU."""
    begin = -(-weight.data_ptr() // _WORD)
    count = (weight.data_ptr() + weight.nbytes) // _WORD - begin
    if weight.device.type != "cpu" or count <= 0:
        return np.empty(0, np.int64)
    return begin - 1 + np.array(sorted({i * (count - 1) // (WORDS - 1) for i in range(WORDS)}))


def words(places: np.ndarray) -> bytes:
    """What lies there now; about 4 us for 150 weights in the cache. The caller sees to it that the memory is held."""
    return _MEMORY[places].tobytes()
