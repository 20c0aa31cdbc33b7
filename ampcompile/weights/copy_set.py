"""The copies of all weights of one graph: the hot path's check that they are fresh, and their renewal in place.

A whole refresh examines everything: memory, sharers, copies. From one update to the next none of that changes as a
rule. So if each of these facts is as it was when the copies were proven fresh, a renewal reads the version counters,
casts the written weights, and keeps the set. Anything else is left to a whole refresh.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, compress, pairwise
from operator import attrgetter, gt, is_not, ne, not_
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels import cast_table, unchanged
from ampcompile.kernels.cast_table import CastTable
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.kernels.unchanged import Unchanged
from ampcompile.torch_private import profiling, storages

from . import gpu
from .copies import Copy, IdleCheck, Packed, count_reads
from .freshness import Sharer
from .sample import Sample
from .store import store

_sharers, _open, _mark, _doubt = map(attrgetter, ("sharers", "step_open", "mark", "doubt"))
_buffer, _seen, _packed, _requires_grad = map(attrgetter, ("buffer", "seen", "packed", "requires_grad"))
_tensor, _words, _trainable = map(attrgetter, ("tensor", "words", "trainable"))


class Renewal:
    """Casts the written weights of one set of float32 weights, while the sharers of their memory stay the same.

    Made when all copies are proven fresh. `copies`: each once, in the order of `sample`; `members`: that of each slot;
    `weights`: of each slot, with its address; `sharers`: all that may write, in the order of the versions for `renew`.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        members: Sequence[Copy],
        weights: Sequence[tuple[Sharer, int]],
        sharers: Sequence[Sharer],
    ) -> None:
        self._copies, self._sharers = copies, sharers
        trainable = all(copy.memory.trainable for copy in members)  # which stays true
        self._slots = [] if trainable else [copy.memory for copy in members]
        self._memory_of = [copy.memory for copy in copies]
        ends = accumulate((len(copy.words) for copy in copies), initial=0)
        self._parts = [slice(begin, end) for begin, end in pairwise(ends)]
        self._memories = list(dict.fromkeys(self._memory_of))
        self._rosters, self._buffers = list(map(_sharers, self._memories)), list(map(_buffer, copies))
        memory_of = {sharer: memory for memory in self._memories for sharer in memory.sharers}
        self._shared = [memory_of[sharer] for sharer in sharers]
        self._idle = IdleCheck(copies)
        weight_of = dict(zip(members, weights, strict=True))
        objects = [weight_of[copy][0].impl for copy in copies]
        begins, dtypes = [weight_of[copy][1] for copy in copies], [copy.form.dtype for copy in copies]
        self._table = CastTable(list(map(_tensor, copies)), objects, begins, dtypes)

    def renew(self, weights: Sequence[Tensor], versions: Sequence[int], sampled: bytes) -> bool:
        """Cast the written weights. Returns False if a whole refresh is needed.

        `versions`: first those of the sharers; `sampled`: the sample after they were read. The caller has checked that
        all weights and sharers are alive, and holds the lock.
        """
        copies, memories = self._copies, self._memories
        if (
            self._rosters != list(map(_sharers, memories))
            or self._buffers != list(map(_buffer, copies))
            or (self._slots and True in map(gt, map(_requires_grad, weights), map(_trainable, self._slots)))
            or True in map(_open, memories)
            or any(map(_packed, copies))
        ):
            return False
        moved, written = list(map(ne, map(_seen, self._sharers), versions)), object()
        for memory in compress(self._shared, moved):
            memory.mark = written  # first: see `Memory.examine`
        for sharer, version in compress(zip(self._sharers, versions, strict=False), moved):
            sharer.seen = version
        marks, doubts = list(map(_mark, self._memory_of)), list(map(_doubt, self._memory_of))
        words = list(map(sampled.__getitem__, self._parts))
        stale = list(map(is_not, map(_mark, copies), marks))
        fresh = list(map(not_, stale))
        known = compress(zip(map(_doubt, copies), map(_words, copies), strict=True), fresh)
        if list(known) != list(compress(zip(doubts, words, strict=True), fresh)):
            return False
        if True in stale:
            if not (self._idle() and self._cast(stale)):
                return False
            for copy, mark, doubt, part in compress(zip(copies, marks, doubts, words, strict=True), stale):
                copy.doubt, copy.words = doubt, part
                copy.mark = mark  # last, as in `note_cast`
            store.end_pass()
        return True

    def _cast(self, stale: Sequence[bool]) -> bool:
        store.begin_pass()
        for copy in compress(self._copies, stale):
            copy.mark, copy.reads = None, 0
        with profiling.region("amp: refresh copies of weights"):
            return self._table.cast(list(map(_tensor, self._copies)), stale)


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
        if self._epoch is not None and not self.rechecks and _renewable(aliases, distinct):
            self._unchanged = self._note_for_cpp()  # made now: later, sharers may have come and gone
            weights = list(zip(self._weights, self._addresses, strict=True))
            self._renewal = Renewal(in_order, members, weights, self._sharers)
        store.sets.add(self)

    def _note_state(self, ids: Sequence[int], now: object) -> None:
        """Record what must stay unchanged: the sharers of the weights' memory, and their versions."""
        weight_sharers = [copy.memory.weights.get(key) for copy, key in zip(self.members, ids, strict=True)]
        proven = all(c.mark is c.memory.mark and c.doubt is c.memory.doubt for c in self.members)
        self._epoch = now if proven and None not in weight_sharers else None
        self._sharers = [sharer for record in self.memories for sharer in record.sharers]
        self._counters, self._versions = [s.counter for s in self._sharers], list(map(_seen, self._sharers))
        self._weights = [sharer for sharer in weight_sharers if sharer is not None]
        self._weights_versions = list(map(_seen, self._weights))
        self._handles = [sharer.handle for sharer in self._sharers]
        self._storages = [record.key for record in self.memories]
        self._users = [record.users() for record in self.memories]

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Return True if none of the weights, which the set was made of, was written."""
        if self._epoch is not store.write_epoch() or store.casting:
            return False
        if self._unchanged is None and unchanged.available():
            self._unchanged = self._note_for_cpp()
        if self._unchanged is None:
            same = self._same_state(weights)
        else:
            same = self._unchanged(list(map(storages.tensor_address, weights)))
        return same and not (self.rechecks and gpu.capturing(weights))

    def _same_state(self, weights: Sequence[Tensor]) -> bool:
        """`Unchanged` in Python, for machines without a compiler."""
        try:
            return (
                self._weights_versions == list(map(storages.version, weights))
                and self._versions == list(map(storages.version, self._counters))
                and True not in map(storages.TensorHandle.expired, self._handles)
                and self._users == list(map(storages.storage_users, self._storages))
                and self._addresses == list(map(Tensor.data_ptr, weights))
                and self.sample.read() == self.words
            )
        except RuntimeError:  # an inference tensor instead, or a weight that another thread has just released
            return False

    def _note_for_cpp(self) -> Unchanged:
        weights = [sharer.impl for sharer in self._weights]
        return Unchanged(
            tensors=[sharer.impl for sharer in self._sharers],
            counters=[*map(storages.tensor_address, self._counters), *weights],
            versions=[*self._versions, *self._weights_versions],
            weights=weights,
            addresses=self._addresses,
            storages=self._storages,
            users=self._users,
            runs=self.sample.runs,
            words=self.sample.words,
            sampled=self.words,
            kept=(self._handles, self._counters, self.memories),
        )

    def renew(self, weights: Sequence[Tensor], now: object) -> bool:
        """Cast the written weights if nothing else changed; `now`: the `write_epoch` before. False: make a new set."""
        if (
            self._renewal is None
            or self._unchanged is None
            or self._packable != len(self._unpacked)  # a new set counts reads from the start
            or (found := self._unchanged.read(list(map(storages.tensor_address, weights)))) is None
        ):
            return False
        self._epoch = None  # first: another thread must not find a half-renewed set fresh
        if not self._renewal.renew(weights, *found):
            return False
        self._unchanged.note()
        self.words, self._epoch = found[1], now
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
        self._handles = self._weights = self._sharers = []
        self._renewal = None  # it holds them too

    def free(self) -> None:
        """Drop all that depends on the buffers: some copies are about to be freed."""
        self.forget()  # first: an interrupt here must not leave a set that counts as fresh with freed copies
        self.rechecks = []
        self.tables.clear()

    def gone(self) -> bool:
        """Return True if a weight was freed, as an object or with its memory."""
        return any(sharer.handle.expired() for sharer in self._weights) or any(
            m.storage() is None for m in self.memories
        )

    def __del__(self) -> None:
        for copy, blocks in self._reads:
            copy.readers[blocks] -= 1


def _renewable(weights: Sequence[Tensor], copies: Sequence[Copy]) -> bool:
    """Return True if C++ can cast the weights again where their copies are."""
    if any(copy.tensor is None for copy in copies):  # packed
        return False
    plain = all(weight.is_cpu and weight.dtype == torch.float32 for weight in weights)
    return plain and cast_table.available() and unchanged.available()
