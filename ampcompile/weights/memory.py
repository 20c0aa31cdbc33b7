"""The memory that weights live in, and the proof that nothing was written there since a cast.

Every tensor on a weight's storage is a sharer, and every sharer may write. PyTorch counts those that hold the storage;
we watch the version counters of those that we track. A copy counts as fresh only while all sharers are tracked and no
counter moved. With one untracked sharer, the weight is compared or cast at every call until that sharer is freed or
found. A writer that holds no reference, such as code with a raw pointer, is detected by a sample at best.
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
"""Held while the records of weights and copies change."""

sets: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every `CopySet`."""
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
on_last_freed: list[Callable[[], None]] = []
"""Called once, when no memory with copies is left."""
handed_out: list[int] = []
"""Addresses in copied memory of aliases with version counters of their own, as `.data` returns."""
ticks = torch.zeros(1, dtype=torch.int64)
"""Written by optimizer steps that were compiled with their hooks: its version shows that one ran."""
_ticks_seen = ticks._version
_epoch = object()


def write_epoch() -> object:
    """A token, the same object until a write to a weight's memory is reported or an alias is handed out."""
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
    """Replace the epoch: every call has to examine its weights again."""
    global _epoch
    _epoch = object()


def doubt_handed_out() -> None:
    """Doubt the memory that aliases were handed out for: it may have been written through them."""
    with lock:
        addresses = sorted(handed_out)
        for memory in memories():
            first = bisect_left(addresses, memory.begin)
            if first < len(addresses) and addresses[first] < memory.end:
                memory.doubted()
        del handed_out[: len(addresses)]


class Sharer:
    """A tensor on a weight's storage: a handle that tells whether it lives, and its counter, shared by its views."""

    __slots__ = ("counter", "handle", "key", "seen")

    def __init__(self, tensor: Tensor, counter: Tensor) -> None:
        self.key, self.handle = id(tensor), storages.TensorHandle(tensor)
        self.counter, self.seen = counter, counter._version


class Memory:
    """One storage that copies were cast from.

    `mark` is replaced by a new object after each write, `doubt` after each possible write.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self._reserved = storages.StorageWeakRef(storage)  # no other storage gets the key
        self.storage = weakref.ref(storage, functools.partial(_storage_freed, weakref.ref(self)))
        self.begin, self.end = 0, 0  # its addresses
        self.mark, self.doubt = object(), object()
        self.sharers: list[Sharer] = []  # a new list whenever one is added or removed
        self.weights: dict[int, Sharer] = {}  # those that graphs read, by id of the tensor
        self.exported: dict[int, Any] = {}  # handles, by id, of tensors that arrays and capsules hold: never tracked
        self.trainable = False
        self.unexplained, self.since = 0, 0.0  # calls in a row with untracked sharers, and the time of the first
        self.reported = False  # the log says that they last
        self.step_open = False  # a fused step of ours is writing here, or began to and failed
        weakref.finalize(self, _forget_ranges_with_the_last).atexit = False
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()

    def written(self) -> None:
        """Record a write to this memory."""
        self.mark = object()
        begin_epoch()

    def doubted(self) -> None:
        """Record a possible write to this memory."""
        self.doubt = object()
        begin_epoch()

    def admit(self, weight: Tensor) -> Sharer | None:
        """Track a tensor that a graph reads; None if it has no version counter. A new one may have written before."""
        self._follow(weight)
        self.trainable |= weight.requires_grad
        sharer = self.weights.get(id(weight))
        if sharer is None or sharer.handle.expired():
            self.doubt = object()
            if (counter := storages.counter_of(weight)) is None:
                return None
            sharer = self.weights[id(weight)] = Sharer(weight, counter)
            self.sharers = [*self.sharers, sharer]
        return sharer

    def _follow(self, weight: Tensor) -> None:
        """Update the addresses: the storage may have been resized, which moves it."""
        storage = weight.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if (begin, begin + size) != (self.begin, self.end):
            self.begin, self.end = begin, begin + size
            self.doubt = object()

    def examine(self, aliases: int = 0) -> int:
        """Detect writes through tracked sharers. Returns the number of others, whose writes aren't detected.

        `aliases`: how many of these others the caller has made; they aren't counted.
        """
        any_freed = False
        for sharer in self.sharers:
            if sharer.seen != (now := sharer.counter._version):
                self.mark = object()  # first: an interrupt here must not leave a write that was seen but not recorded
                sharer.seen = now
            any_freed |= sharer.handle.expired()
        if any_freed:
            self.sharers = [sharer for sharer in self.sharers if not sharer.handle.expired()]
            self.weights = {key: sharer for key, sharer in self.weights.items() if not sharer.handle.expired()}
        unknown = storages.storage_users(self.key) - self.users() - aliases
        if unknown:  # one may have the counter of a sharer that was freed
            self.doubt = object()
        else:
            self.unexplained = 0
        if unknown < 0:  # a sharer moved to another storage
            self.forget_sharers()
        return unknown

    def export(self, holder: Tensor) -> None:
        """Record that an array or capsule holds this tensor: it may write here for as long as the tensor lives."""
        holder.__class__ = storages.Exported
        self.exported[id(holder)] = storages.TensorHandle(holder)
        self.forget(holder)  # another thread's search may just have tracked it as a sharer

    def exports(self) -> int:
        """Number of arrays and capsules."""
        if self.exported:
            self.exported = {key: handle for key, handle in list(self.exported.items()) if not handle.expired()}
        return len(self.exported)

    def open_step(self) -> None:
        """Begin a fused step: until `close_step` no copy counts as fresh. Detects earlier writes, as `examine` does."""
        if self.step_open:  # by a step that failed, and may have written before it raised a version
            self.mark = object()
        self.examine()
        self.step_open = True
        begin_epoch()

    def close_step(self) -> bool:
        """Record that a step has written the memory. Returns True if no untracked sharer may have written it too."""
        self.written()
        proven = not self.examine()
        self.step_open = False
        return proven

    def users(self) -> int:
        """Number of users that the storage has if all its sharers are tracked."""
        return _held_by_python() + len(self.sharers)

    def forget(self, sharer: Tensor) -> None:
        """Stop tracking a sharer that is about to move, or to change its layout."""
        self.doubted()
        self.weights.pop(id(sharer), None)
        self.sharers = [other for other in self.sharers if other.key != id(sharer)]

    def forget_sharers(self) -> None:
        """Forget all sharers, so that no copy counts as fresh until graphs have read the weights again."""
        self.doubted()
        self.weights = {}
        self.sharers = []
        self.exported = {}


@functools.cache
def _held_by_python() -> int:
    """Number of users of a storage that has a Python object, its tensors aside."""
    tensor = torch.empty(1)
    return storages.storage_users(storages.storage_key(tensor)) - 1


def _storage_freed(memory: weakref.ref[Memory], _: object) -> None:
    """Free the copies of a storage's weights at once when the storage is freed."""
    if (record := memory()) is not None:
        for copy in list(record.copies):
            copy.free(gone=True)
        if _memories.get(record.key) is record:
            del _memories[record.key]
        _forget_ranges_with_the_last()


class _IfFree:
    """Takes the lock if no other thread holds it. Both methods are C functions: no signal can leave the lock taken.

    `as` gives True if it is held; if not, leaving raises RuntimeError.
    """

    __enter__ = staticmethod(functools.partial(lock.acquire, blocking=False))
    __exit__ = staticmethod(lock.__exit__)


def _forget_ranges_with_the_last() -> None:
    taken = False
    try:
        with _IfFree() as taken:
            if taken and all(memory() is None for memory in _memories.valuerefs()):
                set_ranges(())
                for copy_set in list(sets):  # they may track weights that moved to memory which nothing watches now
                    copy_set.forget()
                while on_last_freed:
                    on_last_freed.pop()()
    except RuntimeError:
        if taken:
            raise  # else another thread is making copies


def memory_of(tensor: Tensor) -> Memory:
    """Return the one record of the tensor's storage; it is made if there is none."""
    if (record := known_memory(storages.storage_key(tensor))) is None or record.storage() is None:
        record = Memory(tensor)
        _memories[record.key] = record
    return record


def known_memory(storage: int) -> Memory | None:
    """Return the record of a storage, if there is one."""
    return _memories.get(storage)


def known_storages() -> set[int]:
    """Keys of the storages that may have copies."""
    return set(_memories)


def memories() -> list[Memory]:
    """Records of all storages that have copies."""
    return [memory for ref in _memories.valuerefs() if (memory := ref()) is not None]


def everything_doubted() -> None:
    """Record that any weight may have been written."""
    for memory in memories():
        memory.doubted()


def copied_memory_at(tensor: Tensor) -> Memory | None:
    """Return the record of a tensor's storage, if there is one; cheap for tensors outside copied memory."""
    try:
        return copied_memory_of(tensor) if covered(storages.address(tensor)) else None
    except RuntimeError:  # wrapped by a transform, or without memory: nothing there was copied
        return None


def copied_memory_of(tensor: Tensor) -> Memory | None:
    """Return the same record, also if the storage was resized and has other addresses now."""
    try:
        with storages.NoTorchFunction():
            return _memories.get(storages.storage_key(tensor))
    except RuntimeError:
        return None
