"""The table, in C++, of what is known about weights and their copies: it holds the rule by which a copy is fresh.

It reads private fields of torch's objects. So it is tested as it is loaded, on tensors whose holders are known; where
it is wrong, or no compiler is found, no copy is kept: each call casts its weights.

It also reads a few words of each weight in CPU memory, by which it sees writes that nothing reports.
"""

import ctypes
import functools
import logging
import re
from collections.abc import Callable, Sequence
from enum import IntFlag
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels import native
from ampcompile.torch_private import storages
from ampcompile.torch_private.own_thread import made_once


class Status(IntFlag):
    """The status of a copy, as the table gives it: one of the first three, and if it can't be overwritten."""

    FRESH, DOUBTFUL, STALE = 0, 1, 2
    UNWRITABLE = 4

    @property
    def freshness(self) -> "Status":
        """The status without `UNWRITABLE`."""
        return self & ~Status.UNWRITABLE


WRITTEN, WRITTEN_IF_TRAINABLE, PERHAPS_WRITTEN = 0, 1, 2  # reports about storages
ANY_STREAM, NO_STREAM = -1, -2
"""In the place of a stream's address: for this read every stream is in order, or none is."""
STREAMS = 8  # streams on which the calls of a set are remembered to be in order

_TYPES = {"void": None, "int64_t": ctypes.c_int64, "Object*": ctypes.py_object}  # others are addresses
_log = logging.getLogger("ampcompile")


class Table:
    """The functions of `kernels/cpp/weights.cpp`, by name, as it declares them; a `Copy*` is the handle of a copy."""

    def __init__(self, library: Any) -> None:
        declared = (native.SOURCES / "weights.cpp").read_text().partition('extern "C" {')[2]
        for returned, name, taken in re.findall(r"^([\w*]+) (\w+)\(([^)]*)\)", declared, re.MULTILINE):
            function = getattr(library, name)
            function.restype = _TYPES.get(returned, ctypes.c_void_p)
            types = (each.rpartition(" ")[0].strip() for each in taken.split(",") if taken)
            function.argtypes = [_TYPES.get(each, ctypes.c_void_p) for each in types]
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # for mypy: functions are set one by one


def array(handles: Sequence[int]) -> np.ndarray:
    """An array that C++ reads, by its `ctypes.data`."""
    return np.array(handles, np.int64)


@functools.cache
def load() -> Table | None:
    """The table; None, after a warning, where each call has to cast."""
    library = native.objects_library("weights")
    if library is not None and (found := _tried(library)) is not None:
        return found
    reason = "no C++ compiler works, whose message is above, or this version of Python or torch isn't understood"
    _log.warning("each call casts its weights, as no copy of them can be proven fresh here: %s", reason)
    return None


TICKS: Tensor
"""int64 [1], made with the table: written by optimizer steps that are compiled with their hooks."""
KEYS: set[int] = set()
"""Keys of the storages that have copies. Only the table writes it: copies may be freed at any time."""
STEPS: set[Any] = set()
"""Steps of optimizers that have begun and not ended: while there is one, what is cast is stale in the next call."""


@made_once
def _tried(library: Any) -> Table | None:
    """The table, if it sees in known situations who holds a storage, and who shares a version counter."""
    global TICKS
    TICKS, table = torch.zeros(1, dtype=torch.int64, device="cpu"), Table(library)
    table.share(TICKS, KEYS, STEPS)
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float32, device="cpu"))
    # What is held next, given what is held until then; and the numbers of holders and sharers while it is.
    situations: list[tuple[Callable[[Any], Any], tuple[int, int]]] = [
        (lambda _: None, (1, 1)),
        (lambda _: storages.read_data(weight), (2, 1)),
        (lambda _: weight.detach(), (2, 2)),
        (lambda alias: (alias.view(-1), weight.t()), (4, 4)),
        (lambda _: storages.untyped_storage(weight), (2, 1)),
        (lambda storage: storage[:4], (2, 1)),
        (lambda _: weight * weight, (1, 1)),  # whose backward is still to come
        (lambda _: None, (1, 1)),
    ]
    held: Any = None
    for hold, expected in situations:
        held = hold(held)
        if (table.holders_of(weight), table.sharers_of(weight)) != expected:
            return None
    return table


FEWEST = 4  # least number of places in each weight, its first and its last words among them
MOST = 4096  # greatest number of places in each weight
STRIDE = 131072  # elements for each place
RUN = 16
"""Words of four bytes that are read at each place: to reach it, if it isn't cached, takes most of the time, 40 ns."""

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
