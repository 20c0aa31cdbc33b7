"""Copies of this rank's parts of DTensor weights.

An operation on a DTensor writes its part without raising the part's version. Most raise the version of the DTensor, so
that is compared too. What shares the part's memory by way of another DTensor raises neither: while something does, the
weight is compared or cast in each call.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import dtensors, patches, storages

from .binding import Binding
from .spec import CopySpec
from .store import store

MARK = "_ampcompile_mark"
"""The attribute that tells a DTensor from a later one at its address; a weak reference would forbid `swap_tensors`."""
_marks = itertools.count(1)


@functools.cache
def _references_to_unshared_part() -> int:
    """As counted in `Shard.note_writes`: the DTensor's, and one in `ShardBinding.copies`.

    A result of `redistribute` that moves nothing, and a shallow copy, hold the very part too.
    """
    weight = SimpleNamespace(_local_tensor=object())
    _parts = [weight._local_tensor]
    return sys.getrefcount(weight._local_tensor)


class Shard:
    """A DTensor, the storage of its part, and the DTensor's version when its part was last known to be unwritten."""

    def __init__(self, weight: Any) -> None:
        self.mark = next(_marks)
        patches.replace_on(weight, MARK, self.mark)
        self.counter = dtensors.counter_of(weight)
        self.seen = self.counter._version
        self.storage = storages.StorageWeakRef(weight._local_tensor.untyped_storage())
        self.shared = False

    def is_of(self, weight: Any) -> bool:
        """Return True if this record is the DTensor's own, and not of one that was at its address before."""
        return getattr(weight, MARK, 0) == self.mark

    def note_writes(self, weight: Any) -> None:
        """Record writes to the DTensor, and possible ones through another DTensor that is there or was a call ago."""
        if (memory := store.find(weight._local_tensor)) is None:
            return
        now = self.counter._version
        if self.seen != now or weight._version != now:
            memory.written()
            self.seen = now
        shared = len(memory.sharers) > 1 or sys.getrefcount(weight._local_tensor) > _references_to_unshared_part()
        if shared or self.shared:
            memory.doubted()
        self.shared = shared


def _wrap_giving(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Doubt the weight whose memory a result shares: a DTensor around it, made of it or given, writes unseen."""

    @functools.wraps(function)
    def giving(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = function(self, *args, **kwargs)
        try:
            if store.covers(at := storages.address(dtensors.local_part(given))):
                store.hand_out(at)
        except (RuntimeError, TypeError):  # of fakes, or wrapped by a transform
            pass
        return given

    return giving


def _wrap_foreach(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def writing(self: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        try:
            return function(self, *args, **kwargs)
        finally:
            for tensor in filter(dtensors.has_plain_part, self):
                if (memory := store.find_in_ranges(dtensors.local_part(tensor))) is not None:
                    memory.written()

    return writing


_WRAPS = {patches.place_of(what): _wrap_foreach for what in patches.SHARDS.patches} | {
    "DTensor.to_local": _wrap_giving,
    "DTensor.redistribute": _wrap_giving,
}
_shards: weakref.WeakValueDictionary[tuple[int, int], Shard] = weakref.WeakValueDictionary()
"""By the id of the DTensor and the key of its part's storage, which no other storage gets meanwhile."""


class ShardBinding(Binding):
    """The copies that one compiled graph reads of its plain weights, and of the parts of those that are DTensors."""

    def __init__(self, specs: Sequence[CopySpec], in_place: bool = False, whole: Sequence[int] = ()) -> None:
        super().__init__(specs, in_place, whole)
        self._shards: dict[tuple[int, int], Shard] = {}
        self._sweep_shards_at = 64

    def copies(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the copies that the graph reads with these inputs; stale ones are cast first, all in one pass."""
        parts = list(inputs)
        sharded = [i for i in self._indices if dtensors.local_part(inputs[i]) is not inputs[i]]
        for i in sharded:
            weight, parts[i] = inputs[i], inputs[i]._local_tensor
            key = id(weight), storages.storage_key(parts[i])
            shard = self._shards.get(key)
            if shard is None or not shard.is_of(weight):
                shard = self._shards[key] = self._shard_of(weight, key)
            shard.note_writes(weight)
        copies = super().copies(parts)
        if sharded:
            patches.install(patches.SHARDS, _WRAPS, plan=store.on_last_freed.append)
        for i in sharded:
            if inputs[i].requires_grad and (memory := store.find(parts[i])) is not None:
                memory.trainable = True  # a part itself never requires gradients
        return copies

    def _shard_of(self, weight: Any, key: tuple[int, int]) -> Shard:
        if len(self._shards) >= self._sweep_shards_at:
            self._shards = {k: shard for k, shard in self._shards.items() if not shard.storage.expired()}
            self._sweep_shards_at = 2 * len(self._shards) + 64
        shard = _shards.get(key)
        if shard is None or not shard.is_of(weight):
            if (memory := store.find(weight._local_tensor)) is not None:
                memory.written()  # nothing has watched this DTensor so far
            shard = _shards[key] = Shard(weight)
        return shard
