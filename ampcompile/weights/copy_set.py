"""The copies of all weights of one graph: the hot path's check that they are fresh, and their renewal in place.

A whole refresh examines everything: memory, sharers, copies. From one update to the next none of that changes as a
rule. So if each of these facts is as it was when the copies were proven fresh, a renewal reads the version counters,
casts the written weights, and keeps the set. Anything else is left to a whole refresh.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels import unchanged
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.kernels.renewal import CopyPlace, RenewalTable
from ampcompile.kernels.unchanged import Unchanged
from ampcompile.torch_private import dispatcher, profiling, storages

from . import gpu
from .copies import Copy, IdleCheck, Packed, cast, count_reads
from .freshness import Sharer
from .sample import Sample
from .store import store

_buffer, _seen, _tensor = map(attrgetter, ("buffer", "seen", "tensor"))


class Renewal:
    """Casts those written of a set of float32 weights on one device, while the sharers of their memory stay the same.

    Made when all copies are proven fresh. A slot is an input of the graph that is a copy; several may share one.
    `state`: what must stay unchanged. `copies`: all different copies, in the order of the set's sample. `members`: the
    copy of each slot. `weights`: the weight of each slot, and its address. `sharers`: all tensors on the weights'
    memory, in the order of the state's versions. `tables`: of `cast_many_`, on a GPU; None on the CPU, where C++ casts.
    """

    def __init__(
        self,
        state: Unchanged,
        copies: Sequence[Copy],
        members: Sequence[Copy],
        weights: Sequence[tuple[Sharer, int]],
        sharers: Sequence[Sharer],
        tables: dict[Any, Any] | None,
    ) -> None:
        self._state = state
        slots = {copy: i for i, copy in enumerate(members)}
        self._copies, self._slots, self._tables = copies, [slots[copy] for copy in copies], tables
        # Weights that were never trained, and may be from now on: that some are stays true.
        self._frozen = [i for i, copy in enumerate(members) if not copy.memory.trainable]
        self._idle = IdleCheck(copies)
        weight_of = dict(zip(members, weights, strict=True))
        memory_of = {sharer: copy.memory for copy in copies for sharer in copy.memory.sharers}
        places = [
            CopyPlace(
                copy, copy.memory, weight_of[copy][0].impl, weight_of[copy][1], tensor, copy.form.dtype, len(copy.words)
            )
            for copy in copies
            if (tensor := copy.tensor) is not None
        ]
        self._table = RenewalTable(state, sharers, [memory_of[sharer] for sharer in sharers], places)

    def renew(self, weights: Sequence[Tensor]) -> bool:
        """Cast the written weights. Returns False if a whole refresh is needed. The caller holds the lock."""
        if list(map(storages.tensor_address, weights)) != self._state.weights or any(
            weights[i].requires_grad for i in self._frozen
        ):
            return False
        if (stale := self._table.find_stale()) <= 0:
            return not stale
        if not self._table.owned_as_noted():
            if not self._idle():
                return False
            self._table.note_owners()
        store.begin_pass()
        with profiling.region("amp: refresh copies of weights"):
            if self._tables is None:
                written = self._table.cast()
            else:
                written = self._table.cast_by(partial(self._cast_on_gpu, weights))
            if not written:
                return False
        store.end_pass()
        return True

    def written(self) -> list[Copy]:
        """The copies that the last renewal has cast."""
        return list(compress(self._copies, self._table.stale))

    def _cast_on_gpu(self, weights: Sequence[Tensor], stale: np.ndarray) -> None:
        copies = [self._copies[i] for i in stale]
        with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
            # Aliases keep the memory if another thread assigns `.data`, which leaves a doubt about these copies.
            aliases = [storages.alias(weights[self._slots[i]]) for i in stale]
            gpu.follow(copies)
            cast(list(zip(copies, aliases, strict=True)), self._tables)
            gpu.cast_done(copies)


class CopySet:
    """Fresh copies of some weights, and the state that must stay unchanged for them to stay fresh.

    For each slot, an input of the graph that is a copy: `ids`, the id of its weight; `aliases`, an alias of it;
    `members`, the copy; `packed`, the blocks that the graph reads it in, or None. `now`: the `write_epoch` before any
    weight was examined. `before`: the set of the same copies that this one replaces. `tables`: those of `cast_many_`,
    which keep addresses for later casts.
    """

    whole_reads: Mapping[int, Any] = {}
    """The weights themselves, not copies, that are read in calls with this set: see the function `whole_reads`."""
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
        # The forms when all were packed, and the store's `buffers` then: to find a packed one takes a microsecond.
        self._found: list[weakref.ref[Tensor]] = []
        self._found_at: object = None
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
        if self._epoch is not None and _renewable(aliases, distinct):
            self._unchanged = self._note_for_cpp()  # made now: later, sharers may have come and gone
            weights = list(zip(self._weights, self._addresses, strict=True))
            self._renewal = Renewal(
                self._unchanged, in_order, members, weights, self._sharers, tables if self.rechecks else None
            )
        store.sets.add(self)

    def _note_state(self, ids: Sequence[int], now: object) -> None:
        """Record what must stay unchanged: the sharers of the weights' memory, and their versions."""
        weight_sharers = [copy.memory.weights.get(key) for copy, key in zip(self.members, ids, strict=True)]
        proven = all(c.mark == c.memory.mark and c.doubt == c.memory.doubt for c in self.members)
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
        if self._renewal is None or self._packable != len(self._unpacked):  # a new set counts reads from the start
            return False
        if self.rechecks and gpu.capturing(weights):
            return False
        self._epoch = None  # first: another thread must not find a half-renewed set fresh
        if not self._renewal.renew(weights):
            return False
        self._epoch = now
        if self.rechecks:
            written = self._renewal.written()
            for recheck in self.rechecks:
                recheck.look(weights, written)
        return True

    def forms(self) -> list[Any]:
        """The tensors that the graph reads in this call."""
        if self._unpacked:
            with store.lock:
                self._unpacked = count_reads(self._unpacked)
        now = store.buffers
        if self._found_at is now:
            return list(map(operator.call, self._found))
        forms = list(map(_tensor, self._slots))
        known = self._packable and not (self._unpacked or store.casting)  # casting: others may replace them
        if known and all(form is not None for form in forms):
            self._found, self._found_at = list(map(weakref.ref, forms)), now
        return forms

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
    """Return True if the weights can be cast again where their copies are: float32 ones on the CPU or on one GPU."""
    if any(copy.tensor is None for copy in copies):  # packed
        return False
    places = {(weight.device, weight.dtype) for weight in weights}
    known = all(device.type in ("cpu", "cuda") and dtype == torch.float32 for device, dtype in places)
    return known and len(places) == 1 and unchanged.available()
