"""Which memory weights live in, and who else can write there: the version counters of its other tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

from torch import Tensor

from . import compat_weights as compat

_MAX_ADOPTED = 4  # per storage

_creating = threading.RLock()
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
_aliases: dict[Hashable, Alias] = {}
_watched_aliases: dict[Hashable, Alias] = {}
_sweep_at = 1000
_moment = object()


def moment() -> object:
    """The same object for as long as no write to watched memory was reported, nor made through a known alias."""
    if _watched_aliases:
        for alias in list(_watched_aliases.values()):
            alias.look()
    return _moment


class Memory:
    """One storage that has copies or known aliases. `mark` is a new object after each write reported here."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = compat.StorageWeakRef(tensor.untyped_storage())
        self.mark = object()
        self.watched = False
        self.trainable = False
        self.adopted: list[Alias] = []

    def watch(self) -> None:
        """From now on `moment` tells of writes to this memory."""
        if not self.watched:
            self.watched = True
            _watched_aliases.update({a.key: a for a in list(_aliases.values()) if a.memory is self})
        if self.adopted and compat.storage_users(self.storage.cdata) <= 2:
            self.release()  # the weight, and who asks

    def written(self) -> None:
        """Something may have written this memory."""
        global _moment
        self.mark = object()
        if self.watched:
            _moment = object()

    def adopt(self, key: Hashable, counter: Tensor) -> None:
        """Keep looking at a counter of which no tensor is known to be alive."""
        if (same := _aliases.get(key)) in self.adopted:
            self.adopted.remove(same)
            same.forget()
        self.adopted.append(Alias(key, counter, self))
        if len(self.adopted) > _MAX_ADOPTED:
            self.adopted.pop(0).forget()
        _sweep()

    def release(self) -> None:
        """No adopted counter can write here any more."""
        while self.adopted:
            self.adopted.pop().forget()


class Alias:
    """A version counter whose tensors share a weight's memory but not its counter, as `weight.data` does."""

    def __init__(self, key: Hashable, counter: Tensor, memory: Memory) -> None:
        self.key, self.counter, self.memory = key, counter, memory
        self.seen = counter._version
        self.death: weakref.ref[Tensor] | None = None  # of the one tensor that is known to use it
        _aliases[key] = self
        if memory.watched:
            _watched_aliases[key] = self

    def look(self) -> None:
        """Report what was written since the last look."""
        if self.seen != (now := self.counter._version):
            self.memory.written()  # first: another thread that looks now must not find it seen and unreported
            self.seen = now

    def forget(self) -> None:
        """Nothing uses the counter any more."""
        self.look()
        _aliases.pop(self.key, None)
        _watched_aliases.pop(self.key, None)


def memory_of(tensor: Tensor) -> Memory:
    """The one record of the tensor's storage."""
    key = compat.storage_key(tensor)
    if (found := _memories.get(key)) is None:
        with _creating:
            if (found := _memories.get(key)) is None:
                found = _memories[key] = Memory(tensor)
    return found


def known_memory_of(tensor: Tensor) -> Memory | None:
    """The record of the tensor's storage, if there is one."""
    return _memories.get(compat.storage_key(tensor))


def watched_memories() -> list[Memory]:
    """All memory that copies are kept of."""
    return [memory for ref in _memories.valuerefs() if (memory := ref()) is not None and memory.watched]


def _sweep() -> None:
    """Drop what belongs to freed storages, each time that the number of aliases has doubled."""
    global _sweep_at
    if len(_aliases) > _sweep_at:
        for alias in list(_aliases.values()):
            if compat.storage_is_gone(alias.memory.storage.cdata):
                alias.memory.release()
        _sweep_at = 2 * len(_aliases) + 1000
