"""The copies of all weights of one graph, and the hot path's check that they are fresh."""

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
    """Fresh copies of some weights, and the state that must stay unchanged for them to stay fresh.

    `packed`: the blocks that each weight is packed into, or None. `now`: the `write_epoch` before any of the weights
    was examined. `before`: the set of the same copies that this one replaces. `tables`: those of `cast_many_`, for all
    its casts.
    """

    _reads: tuple[tuple[Copy, Blocks | None], ...] = ()  # for `__del__`, if `__init__` fails
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
        in_order = sorted(distinct, key=lambda copy: not copy.places.runs.size)  # `Sample` reads runs first
        self.sample: Sample = before.sample if before else Sample(copy.places for copy in in_order)
        self.words = b"".join(copy.words for copy in in_order)
        self._buffers = list(map(_buffer, members))
        same_buffers = before is not None and before._buffers == self._buffers
        self.rechecks: Rechecks = (
            before.rechecks if before and same_buffers else self._find_rechecks([weight.tensor for weight in weights])
        )
        if self._epoch is not None and not self.rechecks:  # made now: later, sharers may have come and gone
            self._renewal = Renewal(in_order, members, self.sample)
        memory.sets.add(self)

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
        """Return True if none of the weights, which the set was made of, was written. 0.2 us a weight."""
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
        self.words, self._epoch = words, now
        return True

    def forms(self) -> list[Any]:
        """The tensors that the graph reads in this call."""
        if self._unpacked:
            with memory.lock:
                self._unpacked = count_reads(self._unpacked)
        return list(map(_form, self._slots))

    def look(self, weights: Sequence[Tensor], cast: Collection[Copy]) -> None:
        """On GPUs, look for unreported writes, and cast the written weights, ahead of the graph's run.

        `cast`: copies that were already cast in this call.
        """
        for places, recheck in self.rechecks:
            recheck.look([self.members[i] for i in places], [weights[i] for i in places], cast)

    def _find_rechecks(self, weights: Sequence[Tensor]) -> Rechecks:
        rechecks: Rechecks = []
        for device in dict.fromkeys(weight.device for weight in weights if weight.is_cuda):
            places = [i for i, weight in enumerate(weights) if weight.device == device]
            rechecks.append((places, gpu.Recheck(device, [self.members[i] for i in places], self.tables)))
        return rechecks

    def forget(self) -> None:
        """Stop tracking the weights: the set isn't fresh any more."""
        self._epoch = None
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
