"""The copies of all weights of one graph: the hot path's check that they are fresh, and their renewal in place.

A whole refresh examines everything: memory, sharers, copies. From one update to the next none of that changes as a
rule. So if each of these facts is as it was when the copies were proven fresh, a renewal reads the version counters,
casts the written weights, and keeps the set. Anything else is left to a whole refresh.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, compress, pairwise
from operator import attrgetter, gt, is_not, ne
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels import unchanged as unchanged_in_cpp
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.kernels.unchanged import Unchanged
from ampcompile.torch_private import dispatcher, profiling, storages

from . import gpu
from .copies import Copy, IdleCheck, Packed, cast, cast_narrow, count_reads
from .sample import Sample
from .store import store

_sharers, _open, _mark, _doubt = map(attrgetter, ("sharers", "step_open", "mark", "doubt"))
_buffer, _seen, _packed, _requires_grad = map(attrgetter, ("buffer", "seen", "packed", "requires_grad"))
_tensor, _words, _trainable = map(attrgetter, ("tensor", "words", "trainable"))


class Renewal:
    """Casts the written weights of one set, while their addresses and the sharers of their memory stay the same.

    Made when all copies are proven fresh. `copies`: each once, in the order of `sample`; `members`: that of each slot.
    """

    def __init__(self, copies: Sequence[Copy], members: Sequence[Copy], sample: Sample) -> None:
        self._copies, self._sample = copies, sample
        first = {copy: i for i, copy in reversed(list(enumerate(members)))}
        self._sources = [first[copy] for copy in copies]  # index of the weight that each is cast from
        trainable = all(copy.memory.trainable for copy in members)  # which stays true
        self._slots = [] if trainable else [copy.memory for copy in members]
        self._memory_of = [copy.memory for copy in copies]
        ends = accumulate((len(copy.words) for copy in copies), initial=0)
        self._parts = [slice(begin, end) for begin, end in pairwise(ends)]
        self._memories = list(dict.fromkeys(self._memory_of))
        self._rosters = list(map(_sharers, self._memories))
        watched = [(sharer, memory) for memory in self._memories for sharer in memory.sharers]
        self._sharers, self._shared = [sharer for sharer, _ in watched], [memory for _, memory in watched]
        self._counters = [sharer.counter for sharer in self._sharers]
        self._wide = any(copy.form.wide for copy in copies)
        self._idle = IdleCheck(copies)

    def renew(self, weights: Sequence[Tensor], tables: dict[Any, Any]) -> bytes | None:
        """Cast the written weights. Returns the words that the sample had before; None if a whole refresh is needed.

        The caller has checked that all weights and sharers are alive, and holds the lock.
        """
        copies, memories = self._copies, self._memories
        if (
            self._rosters != list(map(_sharers, memories))
            or (self._slots and True in map(gt, map(_requires_grad, weights), map(_trainable, self._slots)))
            or True in map(_open, memories)
            or any(map(_packed, copies))
        ):
            return None
        versions, written = list(map(storages.version, self._counters)), object()
        moved = list(map(ne, map(_seen, self._sharers), versions))
        for memory in compress(self._shared, moved):
            memory.mark = written  # first: see `Memory.examine`
        for sharer, version in compress(zip(self._sharers, versions, strict=True), moved):
            sharer.seen = version
        marks, doubts = list(map(_mark, self._memory_of)), list(map(_doubt, self._memory_of))
        sampled = self._sample.read()
        words = list(map(sampled.__getitem__, self._parts))
        stale = list(map(is_not, map(_mark, copies), marks))
        if not all(stale):
            fresh = [not is_stale for is_stale in stale]
            states = zip(map(_doubt, copies), map(_words, copies), strict=True)
            if list(compress(states, fresh)) != list(compress(zip(doubts, words, strict=True), fresh)):
                return None
            if not any(stale):
                return sampled
        if not self._idle():
            return None
        sources = list(map(weights.__getitem__, self._sources))
        if not all(stale):
            copies, sources, marks = (list(compress(row, stale)) for row in (copies, sources, marks))
            doubts, words = list(compress(doubts, stale)), list(compress(words, stale))
        self._cast(copies, sources, tables)
        for copy, mark, doubt, part in zip(copies, marks, doubts, words, strict=True):
            copy.doubt, copy.words = doubt, part
            copy.mark = mark  # last, as in `note_cast`
        store.end_pass()
        return sampled

    def _cast(self, copies: Sequence[Copy], weights: Sequence[Tensor], tables: dict[Any, Any]) -> None:
        store.begin_pass()
        for copy in copies:
            copy.mark, copy.reads = None, 0
        with profiling.region("amp: refresh copies of weights"):
            if self._wide:
                with torch.no_grad(), dispatcher.without_modes():
                    cast(list(zip(copies, weights, strict=True)), tables)
            else:
                cast_narrow(list(map(_tensor, copies)), weights, tables)


class CopySet:
    """Fresh copies of some weights, and the state that must stay unchanged for them to stay fresh.

    `ids`, `aliases`: of the weights. `packed`: the blocks that each is packed into, or None. `now`: the `write_epoch`
    before any of them was examined. `before`: the set of the same copies that this one replaces. `tables`: those of
    `cast_many_`, for all its casts.
    """

    whole_reads: Mapping[int, Any] = {}
    """The weights that the graph reads otherwise than through copies, in calls with this set: see `whole_reads`."""
    _reads: tuple[tuple[Copy, Blocks | None], ...] = ()  # for `__del__`, if `__init__` fails
    _renewal: Renewal | None = None
    _unchanged: Unchanged | None = None  # made at the first call after a cast

    def __init__(
        self,
        ids: Sequence[int],
        aliases: Sequence[Tensor],
        members: Sequence[Copy],
        packed: Sequence[Blocks | None],
        now: object,
        before: CopySet | None,
        tables: dict[Any, Any],
    ) -> None:
        self.members, self.tables = members, tables
        self._slots: list[Any] = [c if p is None else Packed(c, p) for c, p in zip(members, packed, strict=True)]
        for copy, blocks in set(zip(members, packed, strict=True)):
            self._reads = (*self._reads, (copy, blocks))
            copy.readers[blocks] += 1
        self._unpacked = [s for s in self._slots if isinstance(s, Packed) and s.blocks not in s.copy.packed]
        self._packable = len(self._slots) - packed.count(None)
        distinct = list(dict.fromkeys(members))
        self.memories = list(dict.fromkeys(copy.memory for copy in distinct))
        self._note_state(ids, now)
        self._addresses = list(map(Tensor.data_ptr, aliases))
        in_order = sorted(distinct, key=lambda copy: not copy.places.runs.size)  # `Sample` reads runs first
        self.sample: Sample = before.sample if before else Sample(copy.places for copy in in_order)
        self.words = b"".join(copy.words for copy in in_order)
        self._buffers = list(map(_buffer, members))
        kept = before is not None and before._buffers == self._buffers
        self.rechecks: list[gpu.Recheck] = before.rechecks if before and kept else self._find_rechecks(aliases)
        if self._epoch is not None and not self.rechecks:  # made now: later, sharers may have come and gone
            self._renewal = Renewal(in_order, members, self.sample)
        store.sets.add(self)

    def _note_state(self, ids: Sequence[int], now: object) -> None:
        """Record what must stay unchanged: the sharers of the weights' memory, and their versions."""
        weight_sharers = [copy.memory.weights.get(key) for copy, key in zip(self.members, ids, strict=True)]
        proven = all(c.mark is c.memory.mark and c.doubt is c.memory.doubt for c in self.members)
        self._epoch = now if proven and None not in weight_sharers else None
        self._weight_sharers = [sharer for sharer in weight_sharers if sharer is not None]
        self._versions = list(map(_seen, self._weight_sharers))
        sharers = [sharer for record in self.memories for sharer in record.sharers]
        others = [sharer for sharer in sharers if sharer not in weight_sharers]
        self._other_sharers = others
        self._others, self._others_versions = [s.counter for s in others], [s.seen for s in others]
        self._weights = [sharer.handle for sharer in self._weight_sharers]
        self._handles = [sharer.handle for sharer in sharers]
        self._storages = [record.key for record in self.memories]
        self._users = [record.users() for record in self.memories]

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Return True if none of the weights, which the set was made of, was written."""
        if self._epoch is not store.write_epoch() or store.casting:
            return False
        if (unchanged := self._unchanged) is None and unchanged_in_cpp.available():
            unchanged = self._unchanged = self._note_for_cpp()
        if unchanged is None:
            same = self._same_state(weights)
        else:
            same = unchanged(list(map(storages.tensor_address, weights)))
        return same and not (self.rechecks and gpu.capturing(weights))

    def _same_state(self, weights: Sequence[Tensor]) -> bool:
        """`Unchanged` in Python, for machines without a compiler."""
        try:
            return (
                self._versions == list(map(storages.version, weights))
                and True not in map(storages.TensorHandle.expired, self._handles)
                and self._users == list(map(storages.storage_users, self._storages))
                and self._addresses == list(map(Tensor.data_ptr, weights))
                and self._others_versions == list(map(storages.version, self._others))
                and self.sample.read() == self.words
            )
        except RuntimeError:  # an inference tensor instead, or a weight that another thread has just released
            return False

    def _note_for_cpp(self) -> Unchanged:
        sharers = *self._weight_sharers, *self._other_sharers
        weights = [sharer.impl for sharer in self._weight_sharers]
        return Unchanged(
            tensors=[sharer.impl for sharer in sharers],
            counters=[*weights, *(storages.tensor_address(counter) for counter in self._others)],
            versions=[*self._versions, *self._others_versions],
            weights=weights,
            addresses=self._addresses,
            storages=self._storages,
            users=self._users,
            runs=self.sample.runs,
            words=self.sample.words,
            sampled=self.words,
            kept=(self._handles, self._others, self.memories),
        )

    def renew(self, weights: Sequence[Tensor], now: object) -> bool:
        """Cast the written weights if nothing else changed; `now`: the `write_epoch` before. False: make a new set."""
        if (
            self._renewal is None
            or self._packable != len(self._unpacked)  # a new set counts reads from the start
            or True in map(storages.TensorHandle.expired, self._handles)
            or self._users != list(map(storages.storage_users, self._storages))
            or self._addresses != list(map(Tensor.data_ptr, weights))
        ):
            return False
        self._epoch = None  # first: another thread must not find a half-renewed set fresh
        if (words := self._renewal.renew(weights, self.tables)) is None:
            return False
        self._versions = list(map(_seen, self._weight_sharers))
        self._others_versions = list(map(_seen, self._other_sharers))
        self.words = words
        if self._unchanged is not None:
            self._unchanged.note([*self._versions, *self._others_versions], words)
        self._epoch = now
        return True

    def forms(self) -> list[Any]:
        """The tensors that the graph reads in this call."""
        if self._unpacked:
            with store.lock:
                self._unpacked = count_reads(self._unpacked)
        return list(map(_tensor, self._slots))

    def look(self, weights: Sequence[Tensor], cast: Collection[Copy]) -> None:
        """On GPUs, look for unreported writes, and cast the written weights, ahead of the graph's run.

        `cast`: copies that were already cast in this call.
        """
        for recheck in self.rechecks:
            recheck.look(weights, cast)

    def _find_rechecks(self, weights: Sequence[Tensor]) -> list[gpu.Recheck]:
        rechecks = []
        for device in dict.fromkeys(weight.device for weight in weights if weight.is_cuda):
            places = [i for i, weight in enumerate(weights) if weight.device == device]
            members = [self.members[i] for i in places]
            rechecks.append(gpu.Recheck(places, members, IdleCheck(members), self.tables))
        return rechecks

    def forget(self) -> None:
        """Stop tracking the weights: the set isn't fresh any more."""
        self._epoch = self._unchanged = None
        self._handles = self._weights = self._weight_sharers = self._other_sharers = []
        self._renewal = None  # it holds them too

    def free(self) -> None:
        """Drop all that depends on the buffers: some copies are about to be freed."""
        self.forget()  # first: an interrupt here must not leave a set that counts as fresh with freed copies
        self.rechecks = []
        self.tables.clear()

    def gone(self) -> bool:
        """Return True if a weight was freed, as an object or with its memory."""
        return any(handle.expired() for handle in self._weights) or any(m.storage() is None for m in self.memories)

    def __del__(self) -> None:
        for copy, blocks in self._reads:
            copy.readers[blocks] -= 1
