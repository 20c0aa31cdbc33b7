"""The memory that weights live in, and the proof that nothing was written there since a cast.

Every tensor on a weight's storage is a sharer, and every sharer may write. PyTorch counts those that hold the storage;
we watch the version counters of those that we track. A copy counts as fresh only while all sharers are tracked and no
counter moved. With one untracked sharer, which a walk of Python's heap doesn't find either, the weight is compared or
cast at every call until that sharer is freed or found. A writer that holds no reference, such as code with a raw
pointer, is detected by a sample at best.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.renewal import MemoryRecord, SharerRecord
from ampcompile.torch_private import storages

from .store import store

_SHARE = 0.05
"""Share of the process's time that searches of the whole heap may take."""
_MOST = 1.0
"""Seconds of search time saved up at most: else a day's share would go into consecutive slow calls."""
_LASTS = 8, 5.0
"""Calls in a row, and seconds, after which an unknown sharer is no passing one, such as another thread's call makes."""
_log = logging.getLogger("ampcompile")


class Sharer(SharerRecord):
    """A tensor on a weight's storage: a handle that tells whether it lives, and its counter, shared by its views."""

    __slots__ = ("counter", "handle", "impl", "key")

    def __init__(self, tensor: Tensor, counter: Tensor) -> None:
        self.key, self.impl, self.handle = id(tensor), storages.tensor_address(tensor), storages.TensorHandle(tensor)
        self.counter, self.seen = counter, counter._version


class Memory(MemoryRecord):
    """One storage that copies were cast from.

    `mark` is replaced by a new number after each write, `doubt` after each possible write.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self._reserved = storages.StorageWeakRef(storage)  # no other storage gets the key
        self.storage = weakref.ref(storage, functools.partial(_storage_freed, weakref.ref(self)))
        self.begin, self.end = 0, 0  # its addresses
        self.mark, self.doubt = store.new_mark(), store.new_mark()
        self.sharers = []
        self.weights: dict[int, Sharer] = {}  # those that graphs read, by id of the tensor
        self.exported: dict[int, Any] = {}  # handles, by id, of tensors that arrays and capsules hold: never tracked
        self.trainable = False
        self.unexplained, self.since = 0, 0.0  # calls in a row with untracked sharers, and the time of the first
        self.reported = False  # the log says that they last
        self.step_open = False  # a fused step of ours is writing here, or began to and failed
        weakref.finalize(self, store.forget_with_the_last).atexit = False
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def sharers(self) -> list[Sharer]:
        """The tensors whose writes are detected. A new list whenever one is added or removed."""
        return self._sharers

    @sharers.setter
    def sharers(self, sharers: list[Sharer]) -> None:
        self._sharers, self.roster = sharers, store.new_mark()

    def written(self) -> None:
        """Record a write to this memory."""
        self.mark = store.new_mark()
        store.begin_epoch()

    def doubted(self) -> None:
        """Record a possible write to this memory."""
        self.doubt = store.new_mark()
        store.begin_epoch()

    def admit(self, weight: Tensor) -> Sharer | None:
        """Track a tensor that a graph reads; None if it has no version counter. A new one may have written before."""
        self._follow(weight)
        self.trainable |= weight.requires_grad
        sharer = self.weights.get(id(weight))
        if sharer is None or sharer.handle.expired():
            self.doubt = store.new_mark()
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
            self.doubt = store.new_mark()

    def examine(self, aliases: int = 0) -> int:
        """Detect writes through tracked sharers. Returns the number of others, whose writes aren't detected.

        `aliases`: how many of these others the caller has made; they aren't counted.
        """
        any_freed = False
        for sharer in self.sharers:
            if sharer.seen != (now := sharer.counter._version):
                # first: an interrupt here must not leave a write that was seen but not recorded
                self.mark = store.new_mark()
                sharer.seen = now
            any_freed |= sharer.handle.expired()
        if any_freed:
            self.sharers = [sharer for sharer in self.sharers if not sharer.handle.expired()]
            self.weights = {key: sharer for key, sharer in self.weights.items() if not sharer.handle.expired()}
        unknown = storages.storage_users(self.key) - self.users() - aliases
        if unknown:  # one may have the counter of a sharer that was freed
            self.doubt = store.new_mark()
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
            self.mark = store.new_mark()
        self.examine()
        self.step_open = True
        store.begin_epoch()

    def close_step(self) -> bool:
        """Record that a step has written the memory. Returns True if no untracked sharer may have written it too."""
        self.written()
        proven = not self.examine()
        self.step_open = False
        return proven

    def users(self) -> int:
        """Number of users that the storage has if all its sharers are tracked."""
        return _held_by_python() + len(self.sharers)

    def held_only_by(self, count: int) -> bool:
        """Return True if the storage has no other users than so many tensors."""
        return storages.storage_users(self.key) == _held_by_python() + count

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
    tensor = torch.empty(1, device="cpu")
    return storages.storage_users(storages.storage_key(tensor)) - 1


def _storage_freed(memory: weakref.ref[Memory], _: object) -> None:
    """Free the copies of a storage's weights at once when the storage is freed."""
    if (record := memory()) is not None:
        for copy in list(record.copies):
            copy.free(gone=True)
        if store.memories.get(record.key) is record:
            del store.memories[record.key]
        store.forget_with_the_last()


def memory_of(tensor: Tensor) -> Memory:
    """Return the one record of the tensor's storage; it is made if there is none."""
    if (record := store.memories.get(storages.storage_key(tensor))) is None or record.storage() is None:
        record = Memory(tensor)
        store.memories[record.key] = record
    return record


def unexplained(memories: Sequence[Memory], aliases: Sequence[Tensor]) -> list[Memory]:
    """Search for untracked sharers of `memories`, and return the memories that still have some.

    `memories`: that of each of `aliases`, which the caller has made and which aren't counted.

    The search finds sharers that are tensors in Python: kept views, a state_dict, the flat buffer of an optimizer.
    Walking a heap of a million objects takes a tenth of a second, so the time for it is limited: beyond the limit only
    recently made objects are searched, and weights are cast at each call. Memory that NumPy or DLPack exported isn't
    searched for: nobody has a tensor there whose version could be watched.
    """
    counts = {memory: 0 for memory in memories}
    for memory in memories:
        counts[memory] += 1
    unresolved = [memory for memory in counts if memory.examine(counts[memory])]
    start = time.monotonic()
    store.search_seconds = min(_MOST, store.search_seconds + _SHARE * (start - store.searched_at))
    for generation in range(3 if store.search_seconds > 0 else 2):
        if not (unsearched := [memory for memory in unresolved if memory.examine(counts[memory]) != memory.exports()]):
            break
        _admit_tensors(gc.get_objects(generation), unsearched, set(map(id, aliases)))
    unresolved = [memory for memory in unresolved if memory.examine(counts[memory])]
    store.searched_at = time.monotonic()
    store.search_seconds -= store.searched_at - start
    for memory in unresolved:
        _warn_if_it_lasts(memory, start)
    return unresolved


def _warn_if_it_lasts(memory: Memory, now: float) -> None:
    if not memory.unexplained:
        memory.since = now
    memory.unexplained += 1
    if memory.unexplained >= _LASTS[0] and now - memory.since >= _LASTS[1] and not memory.reported:
        memory.reported = True
        _log.warning(
            "a weight of %d bytes is compared or cast at every call: something that isn't known shares its memory "
            "and may write there (a NumPy array, a view that C++ code or a pending backward keeps, another process)",
            memory.end - memory.begin,
        )


def _admit_tensors(objects: list[object], memories: Iterable[Memory], own: set[int]) -> None:
    """Track the tensors among `objects` that share one of `memories`, except those that arrays hold."""
    ids = {memory.key: own.union(memory.exported, (sharer.key for sharer in memory.sharers)) for memory in memories}
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor) and kind is not storages.Exported}
    tensors = [value for value in objects if type(value) in kinds and isinstance(value, Tensor)]
    sharers = [
        (tensor, memory)
        for tensor in tensors
        if (memory := store.find_in_ranges(tensor)) is not None and id(tensor) not in ids.get(memory.key, (id(tensor),))
    ]
    doubtful = {id(tensor): tensor for tensor, _ in sharers if storages.may_be_in_arrays(tensor)}
    if store.search_seconds <= 0:  # no time left to search for their holders: they stay untracked
        sharers = [(tensor, memory) for tensor, memory in sharers if id(tensor) not in doubtful]
        doubtful = {}
    arrays = _with_hidden_holders(list(doubtful.values()))
    for tensor, memory in sharers:
        if id(tensor) in arrays:
            memory.exported[id(tensor)] = storages.TensorHandle(tensor)
        else:
            memory.admit(tensor)


def _with_hidden_holders(tensors: list[Tensor]) -> set[int]:
    """Return the ids of tensors with a holder that Python's collector doesn't show: an array, or a local variable."""
    if not tensors:
        return set()
    tensors.append(torch.empty(0))  # for comparison: nothing else holds it
    objects, visible = gc.get_objects(), Counter[int]()
    references = list(map(sys.getrefcount, tensors))
    watched = set(map(id, tensors)).__contains__
    for start in range(0, len(objects), 10_000):
        visible.update(filter(watched, map(id, gc.get_referents(*objects[start : start + 10_000]))))
    hidden = [count - visible[id(tensor)] for tensor, count in zip(tensors, references, strict=True)]
    return {id(tensor) for tensor, count in zip(tensors, hidden, strict=True) if count > hidden[-1]}
