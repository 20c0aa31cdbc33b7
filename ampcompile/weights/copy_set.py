"""The copies of all weights of one graph, and the one question of the hot path: are they fresh?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from ampcompile.kernels.packed_conv import Blocks
from ampcompile.torch_private import storages

from . import gpu, memory
from .copies import Copy, Weight, interrupted
from .packing import Packed, count_reads
from .renewal import Renewal
from .sample import Sample

Rechecks = list[tuple[list[int], gpu.Recheck]]
_form, _buffer, _seen = attrgetter("tensor"), attrgetter("buffer"), attrgetter("seen")


class CopySet:
    """Fresh copies of some weights, and everything that has to stay as it is for them to stay fresh.

    `packed`: what weights are packed for, None for those that aren't. `now`: the `write_epoch` before any of the
    weights was looked at. `before`: the set of the same copies that this one takes the place of. `tables`: those of
    `cast_many_`, for all its casts.
    """

    _reads: tuple[tuple[Copy, Blocks | None], ...] = ()  # also while it is being made
    _renewal: Renewal | None = None

    def __init__(
        self,
        weights: Sequence[Weight],
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
        self._note_state([weight.key for weight in weights], now)
        self._addresses = [weight.tensor.data_ptr() for weight in weights]
        in_order = sorted(distinct, key=lambda copy: not copy.places.runs.size)  # as a sample of several reads them
        self.sample: Sample = before.sample if before else Sample(copy.places for copy in in_order)
        self.words = b"".join(copy.words for copy in in_order)
        self._buffers = list(map(_buffer, members))
        stayed = before is not None and before._buffers == self._buffers
        self.rechecks: Rechecks = (
            before.rechecks if before and stayed else self._find_rechecks([weight.tensor for weight in weights])
        )
        if self._epoch is not None and not self.rechecks:  # now: later sharers may have come and gone
            self._renewal = Renewal(in_order, members, self.sample)
        memory.sets.add(self)

    def _note_state(self, ids: Sequence[int], now: object) -> None:
        """Note what must stay: the sharers of the weights' memory, and their versions."""
        known = [copy.memory.weights.get(key) for copy, key in zip(self.members, ids, strict=True)]
        proven = all(c.mark is c.memory.mark and c.doubt is c.memory.doubt for c in self.members)
        self._epoch = now if proven and None not in known else None
        self._known = [sharer for sharer in known if sharer is not None]
        self._versions = list(map(_seen, self._known))
        sharers = [sharer for each in self.memories for sharer in each.sharers]
        others = [sharer for sharer in sharers if sharer not in known]
        self._other_sharers = others
        self._others, self._others_versions = [s.counter for s in others], [s.seen for s in others]
        self._weights = [sharer.handle for sharer in self._known]
        self._handles = [sharer.handle for sharer in sharers]
        self._storages = [each.key for each in self.memories]
        self._users = [each.users() for each in self.memories]

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Whether none of the weights was written; they are the ones that the set was made of. 0.2 us a weight."""
        if self._epoch is not memory.write_epoch() or interrupted():
            return False
        try:
            if self._versions != list(map(storages.version, weights)):
                return False
        except RuntimeError:  # an inference tensor where another tensor had been
            return False
        return (
            True not in map(storages.TensorHandle.expired, self._handles)
            and self._users == list(map(storages.storage_users, self._storages))
            and self._addresses == list(map(Tensor.data_ptr, weights))
            and self._others_versions == list(map(storages.version, self._others))
            and self.sample.read() == self.words
            and not (self.rechecks and gpu.capturing(weights))
        )

    def renew(self, weights: Sequence[Tensor], now: object) -> bool:
        """Cast what was written if that is all that happened; `now`: as at the start. False: make a new set."""
        if (
            self._renewal is None
            or self._packable != len(self._unpacked)  # a new set counts reads from the start
            or True in map(storages.TensorHandle.expired, self._handles)
            or self._users != list(map(storages.storage_users, self._storages))
            or self._addresses != list(map(Tensor.data_ptr, weights))
        ):
            return False
        self._epoch = None  # first: another thread must not find half of what follows
        if (words := self._renewal.renew(weights, self.tables)) is None:
            return False
        self._versions = list(map(_seen, self._known))
        self._others_versions = list(map(_seen, self._other_sharers))
        self.words, self._epoch = words, now
        return True

    def forms(self) -> list[Any]:
        """What the graph reads in this call."""
        if self._unpacked:
            with memory.lock:
                self._unpacked = count_reads(self._unpacked)
        return list(map(_form, self._slots))

    def look(self, weights: Sequence[Tensor], cast: Collection[Copy]) -> None:
        """On GPUs, look for writes that left no trace, and cast what was written, ahead of the call that follows.

        `cast`: copies that were written in this call.
        """
        for places, recheck in self.rechecks:
            recheck.look([self.members[i] for i in places], [weights[i] for i in places], cast)

    def _find_rechecks(self, weights: Sequence[Tensor]) -> Rechecks:
        found: Rechecks = []
        for device in dict.fromkeys(weight.device for weight in weights if weight.is_cuda):
            places = [i for i, weight in enumerate(weights) if weight.device == device]
            found.append((places, gpu.Recheck(device, [self.members[i] for i in places], self.tables)))
        return found

    def forget(self) -> None:
        """Nothing is known of the weights any more."""
        self._epoch = None
        self._handles = self._weights = self._known = self._other_sharers = []
        self._renewal = None  # which holds them too

    def free(self) -> None:
        """Some copies are about to be freed."""
        self.forget()  # first: who is interrupted here must not find it fresh and freed for good
        self.rechecks = []
        self.tables.clear()

    def gone(self) -> bool:
        """Whether a weight was freed, as an object or with its memory."""
        return any(handle.expired() for handle in self._weights) or any(m.storage() is None for m in self.memories)

    def __del__(self) -> None:
        for copy, blocks in self._reads:
            copy.readers[blocks] -= 1
