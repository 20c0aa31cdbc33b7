"""Find which copies of float32 weights are stale, and cast those again, in two calls of C++, or one on a GPU between.

Python and C++ share records of weights and copies, which are the first fields of the objects in `weights/`. So an
update costs what its casts cost; no Python runs for each weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from . import native
from .unchanged import Unchanged


class _Record(ctypes.Structure):
    """An object whose first fields C++ reads and writes; equal to itself alone."""

    __hash__ = object.__hash__


class SharerRecord(_Record):
    """`seen`: the sharer's version when writes through it were last recorded in its memory's mark."""

    _fields_: ClassVar = [("seen", ctypes.c_int64)]


class MemoryRecord(_Record):
    """`mark`, `doubt`, `step_open`: see `Memory`; `roster`: a number, replaced whenever its list of sharers is."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("mark", "doubt", "roster", "step_open")]


class CopyRecord(_Record):
    """`mark`, `doubt`, `buffer`: see `Copy`; `reads`: how many since its values changed, until it is packed."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("mark", "doubt", "buffer", "reads")),
        ("words_address", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class CopyPlace:
    """One copy of a dense float32 weight: `weight` is the address of its C++ object, `begin` that of its numbers.

    `tensor`: of the same shape and strides, in a 16-bit type, or in float32 for numbers of `dtype` held as float32.
    `sampled_bytes`: how many bytes of the state's sample are the weight's.
    """

    record: CopyRecord
    memory: MemoryRecord
    weight: int
    begin: int
    tensor: Tensor
    dtype: torch.dtype
    sampled_bytes: int


class RenewalTable:
    """The addresses of all that a renewal reads and writes. The caller keeps all objects, and C++ objects' memory.

    `state`: the first of its versions are those of `sharers`, and its sample is of the weights of `copies`, both in the
    same order. `shared`: the memory of each sharer.
    """

    def __init__(
        self,
        state: Unchanged,
        sharers: Sequence[SharerRecord],
        shared: Sequence[MemoryRecord],
        copies: Sequence[CopyPlace],
    ) -> None:
        memories = list(dict.fromkeys(copy.memory for copy in copies))
        sizes = np.array([copy.sampled_bytes for copy in copies], dtype=np.int64)
        groups: list[list[Sequence[int] | np.ndarray]] = [
            [_addresses(sharers), _addresses(shared)],
            [_addresses(memories), [memory.roster for memory in memories]],
            [
                _addresses(copy.record for copy in copies),
                _addresses(copy.memory for copy in copies),
                [copy.record.buffer for copy in copies],
                sizes.cumsum() - sizes,
                sizes,
                [copy.weight for copy in copies],
                [copy.tensor._cdata for copy in copies],
                [id(copy.tensor) for copy in copies],
                [copy.tensor.untyped_storage()._cdata for copy in copies],
            ],
            cast_rows([c.begin for c in copies], [c.tensor for c in copies], [c.dtype for c in copies]),
        ]
        marks = np.zeros((6, len(copies)), dtype=np.int64)  # owners of three kinds, marks, doubts, and which are stale
        found = state.versions.copy(), state.sampled.copy()
        self._table, rows = native.table(*groups, also=[*(row.ctypes.data for row in (*marks, *found)), state.address])
        self._kept = state, rows, marks, found
        self._address = self._table.ctypes.data
        self._owned_as_noted = native.weights_function("owned_as_noted", 1)
        self._note_owners = native.weights_function("note_owners", 1)
        self._find = native.weights_function("find_stale_copies", 1)
        self._cast = native.weights_function("cast_stale", 2)
        self._begin, self._end = (native.weights_function(f"{what}_cast", n) for what, n in (("begin", 1), ("end", 3)))
        self._open, self._close = (native.weights_function(f"{what}_step", 1) for what in ("open", "close"))
        self.stale = marks[5]
        """int64, 1 for each copy that the last `find_stale` found stale, else 0."""

    def find_stale(self) -> int:
        """Mark all memory that was written since, and return how many copies are stale; -1 if anything else changed.

        If none is stale, the state is noted as unchanged from now on.
        """
        return self._find(self._address)

    def owned_as_noted(self) -> bool:
        """Return True if each copy has the same buffer, and as many owners as when `note_owners` was called."""
        return bool(self._owned_as_noted(self._address))

    def note_owners(self) -> None:
        """Note how many owners each copy has, in C++ and in Python. Call it when all may be overwritten."""
        self._note_owners(self._address)

    def cast(self) -> bool:
        """Write the weights whose copies were stale, rounded to nearest, into their copies, and note the state.

        Reads 4 bytes an element, and writes 2 or 4. Raises the versions of the copies. Other threads of Python run
        meanwhile. Returns False, and writes nothing, if a weight or copy was freed or has other memory.
        """
        return bool(self._cast(self._address, torch.get_num_threads()))

    def cast_by(self, launch: Callable[[np.ndarray], object]) -> bool:
        """Do as `cast`; `launch` writes the copies, whose indices it gets. If it raises, they are invalid."""
        if not (held := self._begin(self._address)):
            return False
        written = False
        try:
            launch(np.flatnonzero(self.stale))
            written = True
        finally:
            self._end(self._address, held, written)
        return True

    def open_step(self) -> None:
        """Begin a step that writes all the weights and copies; `find_stale` has just returned 0."""
        self._open(self._address)

    def close_step(self) -> bool:
        """End the step, which raised the versions of what it wrote: the copies hold the weights' new values.

        Returns False, and changes nothing, if anything else happened meanwhile.
        """
        return bool(self._close(self._address))


def round_all(begins: Sequence[int], copies: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Write dense float32 numbers from these addresses, rounded to nearest, into tensors of such sizes and layouts.

    Reads 4 bytes an element, and writes 2 or 4. Raises the versions of the copies.
    """
    torch.autograd.graph.increment_version(copies)
    casts, _rows = native.table(cast_rows(begins, copies, dtypes))
    native.weights_function("cast_all", 2)(casts.ctypes.data, torch.get_num_threads())


def cast_rows(
    begins: Sequence[int], copies: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[Sequence[int] | np.ndarray]:
    """The rows that C++ reads of casts: addresses of numbers and results, their count, type and bytes of a result."""
    return [
        begins,
        [copy.data_ptr() for copy in copies],
        [copy.numel() for copy in copies],
        [native.DTYPE_CODES[dtype] for dtype in dtypes],
        [copy.itemsize for copy in copies],
    ]


def _addresses(records: Iterable[ctypes.Structure]) -> list[int]:
    return [ctypes.addressof(record) for record in records]
