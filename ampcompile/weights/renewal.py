"""Cast copies again in place after an update of their weights' values, without a whole refresh.

A refresh examines everything: memory, sharers, copies. From one update to the next none of that changes as a rule. So
if each of these facts is as it was when the copies were proven fresh, a renewal reads the version counters, casts the
written weights, and keeps the set. Anything else is left to a whole refresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress, pairwise
from operator import attrgetter, gt, is_not, ne
from sys import getrefcount
from typing import Any

from torch import Tensor

from ampcompile.torch_private import profiling, storages

from .copies import Copy, begin_pass, cast, cast_narrow, end_pass
from .sample import Sample

_sharers, _open, _mark, _doubt = map(attrgetter, ("sharers", "step_open", "mark", "doubt"))
_seen, _packed, _requires_grad = map(attrgetter, ("seen", "packed", "requires_grad"))
_tensor, _storage, _words, _trainable = map(attrgetter, ("tensor", "storage", "words", "trainable"))


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
        self._owners: Any = None

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
        end_pass()
        return sampled

    def _cast(self, copies: Sequence[Copy], weights: Sequence[Tensor], tables: dict[Any, Any]) -> None:
        begin_pass()
        for copy in copies:
            copy.mark, copy.reads = None, 0
        with profiling.region("amp: refresh copies of weights"):
            if self._wide:
                cast(list(zip(copies, weights, strict=True)), tables)
            else:
                cast_narrow(list(map(_tensor, copies)), weights, tables)

    def _idle(self) -> bool:
        """Return True if all buffers may be written. Only the owner counts are compared while they stay the same."""
        tensors = list(map(_tensor, self._copies))
        users = (
            list(map(storages.tensor_users, tensors)),
            list(map(storages.storage_users, map(_storage, self._copies))),
        )
        owners = *users, list(map(getrefcount, tensors))
        del tensors  # `waited_for` counts Python references: these must not be among them
        if owners != self._owners:
            if any(copy.waited_for() for copy in self._copies):
                return False
            self._owners = owners
        return True
