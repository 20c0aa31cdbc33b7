"""One low-precision copy of one weight: what it was cast from, whether it is fresh, whether it may be overwritten."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import compat_weights as compat
from . import weights_gpu as gpu
from .kernels.cast_many import cast_many_
from .weights_memory import memory_of, moment
from .weights_sample import Sample

_MAX_OBJECTS = 8  # tensors with the same memory that are told apart
_DTYPES = (torch.bfloat16, torch.float16)

lock = threading.RLock()
"""Held by whoever changes copies."""
copies: weakref.WeakValueDictionary[tuple, Copy] = weakref.WeakValueDictionary()
_sets: weakref.WeakSet[CopySet] = weakref.WeakSet()
_passes = 0


class Copy:
    """A weight in low precision, shared by all graphs that read it and freed with the last."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.memory = memory_of(weight)
        self.memory.watch()
        self.mark: object = None  # the memory's at the last cast; None: not cast yet, or of a tensor without version
        self.counters: dict[int, tuple[Tensor, int]] = {}  # by id of a tensor: its counter, the version cast
        self.in_place = False
        self.lent = False
        self.allocate(weight, dtype)

    def allocate(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Take a fresh buffer; the old one stays with whoever saved it."""
        self.tensor = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)
        self.storage = compat.storage_key(self.tensor)
        self.idle = self._owners()

    def _owners(self) -> tuple[int, int, int]:
        """Owners of the buffer: of its tensor in C++, of its storage (views are), of its tensor in Python."""
        in_sets = sum(each.times_held(self.tensor) for each in _sets)
        python = sys.getrefcount(self.tensor) - in_sets
        return compat.tensor_users(self.tensor), compat.storage_users(self.storage), python

    def writable(self) -> bool:
        """Whether the buffer may be overwritten: no backward that is still to come saved it or a view of it."""
        return self.in_place or self._owners() == self.idle

    def fresh(self, weight: Tensor) -> bool:
        """Whether the buffer holds what the weight holds."""
        return (
            self.mark is self.memory.mark
            and id(weight) in self.counters
            and all(counter._version == seen for counter, seen in self.counters.values())
            and self.sample.unchanged()
        )

    def settle(self, weight: Tensor) -> None:
        """Note the state of the weight, which is about to be cast or was just written together with the buffer."""
        counter = compat.counter_of(weight)
        self.mark = self.memory.mark if counter is not None else None
        if counter is not None:
            others = self.counters if len(self.counters) < _MAX_OBJECTS else {}
            known = {**others, id(weight): (counter, 0)}
            self.counters = {key: (each, each._version) for key, (each, _) in known.items()}
        self.sample = Sample.of(weight)

    def forget(self) -> None:
        """The buffer does not hold what the weight holds."""
        self.mark = None


def _all_writable(members: Sequence[Copy]) -> bool:
    return all(copy.writable() for copy in members)


class CopySet:
    """The copies of one set of weights, and everything that has to be as it was for all of them to be fresh."""

    def __init__(self, weights: Sequence[Tensor], members: Sequence[Copy], now: object) -> None:
        self.passes = _passes
        self.members = members
        self.tensors = [copy.tensor for copy in members]
        self._held = Counter(map(id, self.tensors))
        distinct = list({id(copy): copy for copy in members}.values())
        self.ids = list(map(id, weights))
        unknown = (None, -1)  # the version that no tensor has
        self.versions = [copy.counters.get(key, unknown)[1] for copy, key in zip(members, self.ids, strict=True)]
        self.moment = None if -1 in self.versions else now
        tied = [pair for copy in distinct if len(copy.counters) > 1 for pair in copy.counters.values()]
        self.tied, self.tied_versions = [counter for counter, _ in tied], [seen for _, seen in tied]
        self.storages = list({copy.memory.storage.cdata for copy in distinct})
        self.addresses = list(map(Tensor.data_ptr, weights))
        self.sample = Sample.joined(copy.sample for copy in distinct)
        self.rechecks = self._rechecks(weights)
        _sets.add(self)

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same weights and none was written. About 0.2 us a weight."""
        if self.moment is not moment() or self.passes != _passes or self.ids != list(map(id, weights)):
            return False
        if self.rechecks and gpu.capturing(weights):
            return False
        try:
            if self.versions != list(map(compat.version, weights)):
                return False
        except RuntimeError:  # an inference tensor where another tensor had been
            return False
        if self.tied and self.tied_versions != list(map(compat.version, self.tied)):
            return False
        held = list(map(compat.hold_storage, self.storages))  # the sample reads memory, which must not go away
        return None not in held and self.addresses == list(map(Tensor.data_ptr, weights)) and self.sample.unchanged()

    def look(self, weights: Sequence[Tensor]) -> None:
        """On GPUs, look for writes that left no trace, and cast what was written, as part of the call that follows."""
        for places, recheck in self.rechecks:
            if len(places) == len(self.tensors):
                recheck.look(self.tensors, weights)
            else:
                recheck.look([self.tensors[i] for i in places], [weights[i] for i in places])

    def _rechecks(self, weights: Sequence[Tensor]) -> list[tuple[list[int], gpu.Recheck]]:
        found = []
        for device in dict.fromkeys(weight.device for weight in weights if weight.is_cuda):
            places = [i for i, weight in enumerate(weights) if weight.device == device and weight.numel()]
            there = [self.members[i] for i in places]
            writable = functools.partial(_all_writable, there)
            found.append((places, gpu.Recheck(device, [copy.tensor for copy in there], writable)))
        return found

    def gone(self) -> bool:
        """Whether a weight was freed."""
        return any(map(compat.storage_is_gone, self.storages))

    def times_held(self, tensor: Tensor) -> int:
        """How many references to a buffer are this set's."""
        return self._held[id(tensor)]


def copy_of(weight: Tensor, dtype: torch.dtype) -> Copy:
    """The one copy of a weight in a dtype, made if there is none yet."""
    key = _key(weight, dtype)
    if (copy := copies.get(key)) is None:
        copy = copies[key] = Copy(weight, dtype)
    return copy


def copies_of(weight: Tensor) -> list[Copy]:
    """All copies of a weight."""
    return [copy for dtype in _DTYPES if (copy := copies.get(_key(weight, dtype))) is not None]


def _key(weight: Tensor, dtype: torch.dtype) -> tuple:
    """Copies belong to memory as it is laid out, not to tensor objects: tied weights share one."""
    place = compat.storage_key(weight), weight.data_ptr()
    return (*place, weight.shape, weight.stride(), weight.dtype, dtype)


def refresh(pairs: Iterable[tuple[Copy, Tensor]], every: bool) -> None:
    """Cast the weights whose copies are out of date, or `every` one, all in one pass."""
    global _passes
    stale = list({id(copy): (copy, weight) for copy, weight in pairs if every or not copy.fresh(weight)}.values())
    if not stale:
        return
    for copy, weight in stale:
        if not copy.writable():
            copy.allocate(weight, copy.tensor.dtype)
        copy.settle(weight)
    written = [copy.tensor for copy, _ in stale]
    try:
        cast_many_(written, [weight for _, weight in stale])
        gpu.cast_done(written)
        _passes += 1
    except BaseException:
        for copy, _ in stale:
            copy.forget()
        raise


def passes() -> int:
    """How many refresh passes have cast something."""
    return _passes
