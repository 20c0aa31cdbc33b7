"""One low-precision copy of one weight: what it was cast from, whether it is fresh, whether it may be overwritten."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import compat_weights as compat
from . import weights_gpu as gpu
from .kernels.cast_many import cast_many_
from .weights_memory import memory_of
from .weights_sample import places, words

_MAX_OBJECTS = 8  # tensors with the same memory that are told apart
_DTYPES = (torch.bfloat16, torch.float16)


class Holder(Protocol):
    """Who keeps references to buffers that are no sign of a pending backward."""

    def references_to(self, buffer: Tensor) -> int: ...


lock = threading.RLock()
"""Held by whoever changes copies."""
copies: weakref.WeakValueDictionary[tuple, Copy] = weakref.WeakValueDictionary()
holders: dict[int, weakref.ref[Holder]] = {}
_passes = 0


class Weight(NamedTuple):
    """A weight for the time of one refresh."""

    key: int
    """The id of the tensor."""
    tensor: Tensor
    """An alias of it: it stays in its memory, and holds it, even if another thread gives the weight other data."""

    @classmethod
    def of(cls, tensor: Tensor) -> Weight:
        return cls(id(tensor), compat.alias(tensor))


class Copy:
    """A weight in low precision, shared by all graphs that read it and freed with the last."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.memory = memory_of(weight)
        self.memory.watch()
        self.mark: object = None  # the memory's at the last cast; None: out of date, or of a tensor without version
        self.counters: dict[int, tuple[Tensor, int]] = {}  # by id of a tensor: its counter, the version cast
        self.places, self.words = places(weight), b""
        self.in_place = False
        self.lent = False
        self._allocate(weight, dtype)

    def _allocate(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Take a fresh buffer; the old one stays with whoever saved it."""
        self.tensor = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)
        self._storage = compat.storage_key(self.tensor)
        self._idle = self._owners()

    def _owners(self) -> tuple[int, int, int]:
        """Owners of the buffer: of its tensor in C++, of its storage (views are), of its tensor in Python."""
        ours = sum(holder.references_to(self.tensor) for ref in list(holders.values()) if (holder := ref()))
        python = sys.getrefcount(self.tensor) - ours
        return compat.tensor_users(self.tensor), compat.storage_users(self._storage), python

    def writable(self) -> bool:
        """Whether the buffer may be overwritten: no backward that is still to come saved it or a view of it."""
        return self.in_place or self._owners() == self._idle

    def fresh(self, weight: Weight) -> bool:
        """Whether the buffer holds what the weight holds."""
        return (
            self.mark is self.memory.mark
            and weight.key in self.counters
            and all(counter._version == seen for counter, seen in self.counters.values())
            and words(self.places) == self.words
        )

    def prepare(self, weight: Weight) -> None:
        """Have a buffer that may be overwritten, and note what the weight is now: it is about to be cast."""
        if not self.writable():
            self._allocate(weight.tensor, self.tensor.dtype)
        self.settle(weight)

    def settle(self, weight: Weight) -> None:
        """The buffer holds, or is about to hold, what the weight holds now."""
        counter = compat.counter_of(weight.tensor)
        self.mark = self.memory.mark if counter is not None else None
        if counter is not None:
            others = self.counters if len(self.counters) < _MAX_OBJECTS else {}
            known = {**others, weight.key: (counter, 0)}
            self.counters = {key: (each, each._version) for key, (each, _) in known.items()}
        self.words = words(self.places)

    def forget(self) -> None:
        """The buffer does not hold what the weight holds."""
        self.mark = None


def copy_of(weight: Tensor, dtype: torch.dtype) -> Copy:
    """The one copy of a weight in a dtype, made if there is none yet."""
    key = _place(weight), dtype
    if (copy := copies.get(key)) is None:
        copy = copies[key] = Copy(weight, dtype)
    return copy


def copies_of(weight: Tensor) -> list[Copy]:
    """All copies of a weight."""
    if not copies:
        return []
    place = _place(weight)
    return [copy for dtype in _DTYPES if (copy := copies.get((place, dtype))) is not None]


def _place(weight: Tensor) -> tuple:
    """Copies belong to memory as it is laid out, not to tensor objects: tied weights share one."""
    return compat.storage_key(weight), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def refresh(pairs: Iterable[tuple[Copy, Weight]], every: bool) -> None:
    """Cast the weights whose copies are out of date, or `every` one, all in one pass."""
    global _passes
    stale = list({id(copy): (copy, weight) for copy, weight in pairs if every or not copy.fresh(weight)}.values())
    if not stale:
        return
    try:
        for copy, weight in stale:
            copy.prepare(weight)
        written = [copy.tensor for copy, _ in stale]
        cast_many_(written, [weight.tensor for _, weight in stale])
        gpu.cast_done(written)
    except BaseException:
        for copy, _ in stale:
            copy.forget()
        raise
    _passes += 1


def passes() -> int:
    """How many refresh passes have cast something."""
    return _passes
