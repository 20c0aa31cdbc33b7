"""Cast float32 weights into their copies time and again, by a table of addresses that is made once (CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from . import native


def available() -> bool:
    """True if the library can be built here."""
    return native.weights_function("cast_chosen", 2) is not None


class CastTable:
    """Where weights and their copies lie, and the type that each weight is rounded to.

    `weights`: the addresses of their C++ objects, `begins`: those of their numbers, dense and float32. `copies`: of the
    same shapes and strides, in 16-bit types, or in float32 for 16-bit numbers held as float32. The caller keeps the
    memory of copies and C++ objects.
    """

    def __init__(
        self, copies: Sequence[Tensor], weights: Sequence[int], begins: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> None:
        rows = [
            weights,
            begins,
            [copy.data_ptr() for copy in copies],
            [copy.numel() for copy in copies],
            [native.DTYPE_CODES[dtype] for dtype in dtypes],
            [copy.itemsize for copy in copies],
        ]
        self._rows = np.array(rows, dtype=np.int64)
        self._chosen = np.zeros(len(copies), dtype=np.bool_)
        addresses = *(row.ctypes.data for row in self._rows), self._chosen.ctypes.data
        self._table = np.array([len(copies), *addresses], dtype=np.int64)  # a `Table`
        self._address, self._cast = self._table.ctypes.data, native.weights_function("cast_chosen", 2)

    def cast(self, copies: Sequence[Tensor], chosen: Sequence[bool]) -> bool:
        """Write the chosen weights, rounded to nearest, into their copies, and raise the versions of these.

        Reads 4 bytes an element, and writes 2 or 4. Other threads of Python run meanwhile. Returns False, and writes
        nothing, if a weight was freed or has other memory.
        """
        self._chosen[:] = chosen
        torch.autograd.graph.increment_version(list(compress(copies, chosen)))
        return bool(self._cast(self._address, torch.get_num_threads()))
