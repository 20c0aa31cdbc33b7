"""Which memory weights live in, and the proof that nobody wrote there since a cast.

Every tensor on a weight's storage is a sharer, and every sharer may write. PyTorch counts those that hold the storage;
we watch the version counters of the ones we know. A copy counts as fresh only while the two agree: all sharers are
known, and no counter moved. One sharer too many, whoever it is, and the weight is compared or cast at every call
until it is gone or found out. Who writes and holds nothing, as through a raw pointer, shows in a sample at best.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import storages

from .ranges import covered, set_ranges

lock = threading.RLock()
"""Held by whoever changes what is known of weights and copies."""

sets: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every `CopySet`."""
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
on_last_freed: list[Callable[[], None]] = []
"""Called once, when no memory with copies is left."""
handed_out: list[int] = []
"""Addresses in copied memory for which somebody got an alias with a counter of its own, as `.data` has."""
ticks = torch.zeros(1, dtype=torch.int64)
"""Written where an optimizer's step was compiled, hooks and all: its version tells that it ran."""
_ticks_seen = ticks._version
_epoch = object()


def write_epoch() -> object:
    """The same object for as long as no write to a weight's memory was reported, and no alias was handed out."""
    global _ticks_seen
    if ticks._version != _ticks_seen:
        for memory in memories():
            if memory.trainable:
                memory.written()
        _ticks_seen = ticks._version
    if handed_out:
        doubt_handed_out()
    return _epoch


def begin_epoch() -> None:
    """Have every call look closely."""
    global _epoch
    _epoch = object()


def doubt_handed_out() -> None:
    """What aliases were handed out for may have been written through them."""
    with lock:
        addresses = sorted(handed_out)
        for memory in memories():
            first = bisect_left(addresses, memory.begin)
            if first < len(addresses) and addresses[first] < memory.end:
                memory.doubted()
        del handed_out[: len(addresses)]


class Sharer:
    """A tensor on a weight's storage: whether it is alive, and its version counter, which its views share."""

    __slots__ = ("counter", "handle", "key", "seen")

    def __init__(self, tensor: Tensor, counter: Tensor) -> None:
        self.key, self.handle = id(tensor), storages.TensorHandle(tensor)
        self.counter, self.seen = counter, counter._version


class Memory:
    """One storage that copies were cast from.

    `mark` is another object after each write, `doubt` whenever there may have been one.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self._reserved = storages.StorageWeakRef(storage)  # no other storage gets the key
        self.storage = weakref.ref(storage, functools.partial(_storage_freed, weakref.ref(self)))
        self.begin, self.end = 0, 0  # its addresses
        self.mark, self.doubt = object(), object()
        self.sharers: list[Sharer] = []  # another list whenever one comes or goes
        self.weights: dict[int, Sharer] = {}  # those that graphs read, by id of the tensor
        self.exported: dict[int, Any] = {}  # handles, by id, of what arrays and capsules hold: sharers never known
        self.trainable = False
        self.unexplained, self.since = 0, 0.0  # calls in a row that left unknown sharers, and when the first did
        self.reported = False  # in the log, that they last
        self.step_open = False  # a fused step of ours writes here, or began to and failed
        weakref.finalize(self, _forget_ranges_with_the_last).atexit = False
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()

    def written(self) -> None:
        """Something has written this memory."""
        self.mark = object()
        begin_epoch()

    def doubted(self) -> None:
        """Something may have written this memory."""
        self.doubt = object()
        begin_epoch()

    def admit(self, weight: Tensor) -> Sharer | None:
        """Know a tensor that a graph reads; None for one without a counter. A new one may have written before."""
        self._follow(weight)
        self.trainable |= weight.requires_grad
        known = self.weights.get(id(weight))
        if known is None or known.handle.expired():
            self.doubt = object()
            if (counter := storages.counter_of(weight)) is None:
                return None
            known = self.weights[id(weight)] = Sharer(weight, counter)
            self.sharers = [*self.sharers, known]
        return known

    def _follow(self, weight: Tensor) -> None:
        """The storage may have been resized, and lie elsewhere now."""
        storage = weight.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if (begin, begin + size) != (self.begin, self.end):
            self.begin, self.end = begin, begin + size
            self.doubt = object()

    def examine(self, aliases: int = 0) -> int:
        """Notice what was written through known sharers. Returns how many others there are: their writes go unnoticed.

        `aliases`: how many the caller has made.
        """
        gone = False
        for sharer in self.sharers:
            if sharer.seen != (now := sharer.counter._version):
                self.mark = object()  # first: who is interrupted here must not find it seen and unreported
                sharer.seen = now
            gone |= sharer.handle.expired()
        if gone:
            self.sharers = [sharer for sharer in self.sharers if not sharer.handle.expired()]
            self.weights = {key: sharer for key, sharer in self.weights.items() if not sharer.handle.expired()}
        unknown = storages.storage_users(self.key) - self.users() - aliases
        if unknown:  # one may have the counter of a sharer that is no more
            self.doubt = object()
        else:
            self.unexplained = 0
        if unknown < 0:  # a sharer went elsewhere
            self.forget_sharers()
        return unknown

    def export(self, holder: Tensor) -> None:
        """Whoever holds what this tensor holds may write here, now and for as long as the tensor lives."""
        holder.__class__ = storages.Exported
        self.exported[id(holder)] = storages.TensorHandle(holder)
        self.forget(holder)  # another thread's search may just have taken it for a tensor like others

    def exports(self) -> int:
        """How many arrays and capsules there are."""
        if self.exported:
            self.exported = {key: each for key, each in list(self.exported.items()) if not each.expired()}
        return len(self.exported)

    def open_step(self) -> None:
        """From now to `close_step` nothing here counts as fresh. Tells what was written before, as `examine` does."""
        if self.step_open:  # by a step that failed, and may have written before it raised a version
            self.mark = object()
        self.examine()
        self.step_open = True
        begin_epoch()

    def close_step(self) -> bool:
        """A step has written the memory. Returns whether it is known that nobody else did."""
        self.written()
        proven = not self.examine()
        self.step_open = False
        return proven

    def users(self) -> int:
        """How many hold the storage if there are no others than the known sharers."""
        return _held_by_python() + len(self.sharers)

    def forget(self, sharer: Tensor) -> None:
        """A sharer is about to leave, or to lie otherwise."""
        self.doubted()
        self.weights.pop(id(sharer), None)
        self.sharers = [known for known in self.sharers if known.key != id(sharer)]

    def forget_sharers(self) -> None:
        """Know nobody any more, so that nothing counts as fresh until graphs have read the weights again."""
        self.doubted()
        self.weights = {}
        self.sharers = []
        self.exported = {}


@functools.cache
def _held_by_python() -> int:
    """How often a storage that has a Python object is held, its tensors aside."""
    tensor = torch.empty(1)
    return storages.storage_users(storages.storage_key(tensor)) - 1


def _storage_freed(memory: weakref.ref[Memory], _: object) -> None:
    """The weights are gone: their copies go with them, at once."""
    if (found := memory()) is not None:
        for copy in list(found.copies):
            copy.free(gone=True)
        if _memories.get(found.key) is found:
            del _memories[found.key]
        _forget_ranges_with_the_last()


class _IfFree:
    """Holds the lock if no other thread does. Both ways are C's: no signal comes between taking it and letting it go.

    `as` gives whether it is held; if not, leaving raises RuntimeError.
    """

    __enter__ = staticmethod(functools.partial(lock.acquire, blocking=False))
    __exit__ = staticmethod(lock.__exit__)


def _forget_ranges_with_the_last() -> None:
    taken = False
    try:
        with _IfFree() as taken:
            if taken and all(memory() is None for memory in _memories.valuerefs()):
                set_ranges(())
                for each in list(sets):  # weights that moved away are still known there, and nobody watches them now
                    each.forget()
                while on_last_freed:
                    on_last_freed.pop()()
    except RuntimeError:
        if taken:
            raise  # else another thread is making copies


def memory_of(tensor: Tensor) -> Memory:
    """The one record of the tensor's storage."""
    if (found := known_memory(storages.storage_key(tensor))) is None or found.storage() is None:
        found = Memory(tensor)
        _memories[found.key] = found
    return found


def known_memory(storage: int) -> Memory | None:
    """The record of a storage, if there is one."""
    return _memories.get(storage)


def known_storages() -> set[int]:
    """The storages of which there may be copies."""
    return set(_memories)


def memories() -> list[Memory]:
    """All memory that copies are kept of."""
    return [memory for ref in _memories.valuerefs() if (memory := ref()) is not None]


def everything_doubted() -> None:
    """Any weight may have been written."""
    for memory in memories():
        memory.doubted()


def copied_memory_at(tensor: Tensor) -> Memory | None:
    """The record of a tensor's storage, for any tensor and cheap for those that lie elsewhere."""
    try:
        return copied_memory_of(tensor) if covered(storages.address(tensor)) else None
    except RuntimeError:  # wrapped by a transform, or without memory: nothing there was copied
        return None


def copied_memory_of(tensor: Tensor) -> Memory | None:
    """The same, also where a storage was resized and lies elsewhere now."""
    try:
        with storages.NoTorchFunction():
            return _memories.get(storages.storage_key(tensor))
    except RuntimeError:
        return None
