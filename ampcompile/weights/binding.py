"""The copies that a compiled graph reads: found, proven fresh or cast before each call."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher, marks, storages

from . import table
from .copies import (
    Copy,
    capturing,
    cast_anew,
    cast_into,
    copy_of,
    found_copy,
    freshen,
    is_fresh,
    order_on_current_stream,
    packed_copy,
)
from .reports import drop_failed_steps, watch_shards, watch_writers
from .spec import CopySpec
from .store import store, whole_reads

REFRESH = "amp: refresh copies of weights"
PAYS = 3
"""Reads of a copy before it is packed. Packing costs what it saves in as many calls: a weight that changes at every
call is never packed, and no program pays more than twice the least possible."""


class CopySet:
    """The copies that a graph reads with some weights.

    `slots`: the indices of the weights among the graph's `inputs`. `packable`: some of the copies are to be packed;
    `reads`: how many calls in a row have read the set since a copy was last cast.
    """

    def __init__(self, copies: Sequence[Copy], slots: Sequence[int], inputs: tuple[Any, ...], packable: bool) -> None:
        self.copies, self.slots, self.packable, self.reads = copies, slots, packable, 1
        self.keys = {copy.key for copy in copies}
        self.gpu_copies = {copy: i for i, copy in enumerate(copies) if copy.on_gpu}
        self.devices = {inputs[i].device for i, copy in zip(slots, copies, strict=True) if copy.on_gpu}
        self.table_suffices = self.read_suffices = False
        self.whole_reads: dict[int, Any] = {}
        handles, places, counters = (table.array(row) for row in ([c.handle for c in copies], slots, slots))
        store.table.note_counters(len(slots), places.ctypes.data, inputs, counters.ctypes.data)
        waited = np.full((table.STREAMS, 2), table.NO_STREAM)
        self._rows = handles, places, counters, waited  # kept, as the table reads them by their addresses
        *rows, self.waited = (row.ctypes.data for row in self._rows)
        self.rows = len(slots), *rows
        store.sets.add(self)

    def classify(self) -> None:
        """Note if the table alone can make the copies fresh, and if a read of it is all that a call needs then."""
        self.table_suffices = not self.packable and not any(copy.trial for copy in self.copies)
        # On several devices no single stream could say that the casts came before.
        self.read_suffices = self.table_suffices and len(self.devices) < 2

    def stream(self) -> int:
        """The stream on which a read comes after the casts. In a capture, and on several devices, there is none."""
        if not self.devices:
            return 0
        if len(self.devices) > 1 or torch.cuda.is_current_stream_capturing():
            return table.NO_STREAM
        return storages.current_stream(next(iter(self.devices)))

    def use(self, buffers: list[Tensor]) -> list[Tensor]:
        """Let the current streams read these buffers of the copies. The store's lock is held."""
        if self.devices:
            order_on_current_stream(self.gpu_copies, [buffers[i] for i in self.gpu_copies.values()])
            store.table.note_waited(self.waited, self.stream())
        return buffers


class Binding:
    """The copies that one compiled graph reads, as its `specs` describe them. Thread-safe.

    Each set of weights that the graph is called with has a set of copies, for as long as these weights live: blocks
    that are compiled one by one share a graph.

    `in_place`: copies keep their addresses, as replayed CUDA graphs need; a pending backward that saved a copy which
    is then overwritten raises autograd's error. `whole`: indices of the weights that the graph reads themselves, not
    only copies of them.
    """

    def __init__(self, specs: Sequence[CopySpec], in_place: bool = False, whole: Sequence[int] = ()) -> None:
        self._specs, self._in_place, self._whole = specs, in_place, whole
        self._indices, self._forms = [spec.weight for spec in specs], [spec.form for spec in specs]
        self.sets: dict[tuple[int, ...], CopySet] = {}  # by the addresses of the weights
        self.last: CopySet | None = None
        self._buffers: list[Tensor] = []  # of copies that aren't kept fresh, but in place
        self._sweep_at = 8
        self._read: Any = None if (reader := table.load()) is None else reader.read_copies
        store.bindings.add(self)

    def copies(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies that the graph reads with these inputs; stale ones are cast first, all in one pass.

        By the first of five routes that can: a captured step's (`CapturedCopies.read`); a read of the set of the last
        call; `_cast_and_read`; `_renew`; `_cast_each_call`. `_find` tries the second and third with these weights.
        """
        if type(inputs) is not tuple:
            inputs = tuple(inputs)
        if (capture := store.capture) is not None and (buffers := capture.read(self, inputs)) is not None:
            return buffers
        # Without the store's lock: the table looks at the weights and hands the buffers out in one go, under Python's.
        last = self.last
        if last is not None and last.read_suffices:
            buffers = self._read(*last.rows, inputs, last.waited, last.stream() if last.devices else 0, 0)
            if buffers is False and not last.devices:  # a GPU's casts need launches, which C++ can't make
                buffers = self._cast_and_read(last, inputs)
            if buffers:
                return buffers
        return self._find(inputs)

    def whole_reads(self) -> dict[int, Any]:
        """The weights themselves, not copies, that the graph has read in its calls: see the function `whole_reads`."""
        return {key: ref for copy_set in list(self.sets.values()) for key, ref in copy_set.whole_reads.items()}

    def only_weights(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, with None for all that aren't weights."""
        weights = {*self._indices, *self._whole}
        return tuple(value if i in weights else None for i, value in enumerate(inputs))

    def set_of(self, inputs: tuple[Any, ...]) -> CopySet | None:
        """The set of these weights, if there is one that the table alone can make fresh."""
        copy_set = self.sets.get(self._key([inputs[i] for i in self._indices]))
        if copy_set is None or not copy_set.table_suffices or not store.table.is_set_of(*copy_set.rows, inputs):
            return None
        return copy_set

    def keep_in_place(self, inputs: tuple[Any, ...]) -> CopySet | None:
        """Make the copies of these weights fresh; they stay where they are from then on. None if none are kept."""
        self.copies(inputs)
        copy_set = self.set_of(inputs)
        for copy in copy_set.copies if copy_set is not None else ():
            copy.keep_in_place()
        return copy_set

    def _find(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        """Taken where the last set isn't of these weights, isn't fresh, or is counted until it is packed."""
        weights = [inputs[i] for i in self._indices]
        key = self._key(weights)
        if self._read is None or not key:
            return self._cast_each_call(weights)
        copy_set, buffers = self.sets.get(key), None
        if copy_set is not None:
            copy_set.reads += 1
            if not copy_set.packable or copy_set.reads < PAYS:
                self.last = copy_set
                buffers = self._read(*copy_set.rows, inputs, copy_set.waited, copy_set.stream(), 0)
            if buffers is False and copy_set.table_suffices and not copy_set.devices:
                buffers = self._cast_and_read(copy_set, inputs)
            if buffers:
                return buffers
        with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes(), store.lock:
            if capturing(weights):  # a copy that the graph reads would be stale in its replays
                return cast_anew([storages.alias(weight) for weight in weights], self._forms)
            if buffers is False and copy_set is not None and copy_set.devices:  # perhaps fresh, but not in order
                buffers = self._read(*copy_set.rows, inputs, copy_set.waited, table.ANY_STREAM, 0)
                if buffers:
                    return copy_set.use(buffers)
            if all(map(storages.has_counter, weights)):
                return self._renew(key, weights, inputs)
        return self._cast_each_call(weights)

    def _key(self, weights: Sequence[Tensor]) -> tuple[int, ...]:
        try:
            return tuple(map(Tensor.data_ptr, weights))
        except RuntimeError:  # without memory of its own
            return ()

    def _cast_and_read(self, copy_set: CopySet, inputs: tuple[Any, ...]) -> Any:
        """Taken on a CPU where weights of a known set were written: the table casts what is stale, in C++."""
        with store.lock, marks.region(REFRESH):
            return self._read(*copy_set.rows, inputs, copy_set.waited, table.ANY_STREAM, torch.get_num_threads())

    def _cast_each_call(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Taken where freshness can't be proven: without a table, and for weights without memory or counter."""
        with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
            if not self._in_place:
                return cast_anew(weights, self._forms)
            if not self._buffers:
                self._buffers = [form.empty_like(weight) for form, weight in zip(self._forms, weights, strict=True)]
            cast_into(list(zip(self._forms, self._buffers, weights, strict=True)))
            return list(self._buffers)

    def _renew(self, key: tuple[int, ...], weights: Sequence[Tensor], inputs: tuple[Any, ...]) -> list[Tensor]:
        """Taken in the first call, on a GPU after a write, and where the table alone doesn't suffice.

        Makes all copies fresh, packs those for which it pays now, and replaces the set if it isn't of these copies.
        """
        drop_failed_steps()
        passes = store.table.count_passes()
        aliases = [storages.alias(weight) for weight in weights]  # they keep the memory if another thread sets `.data`
        chosen = [self._choose(alias, spec) for alias, spec in zip(aliases, self._specs, strict=True)]
        former = self.sets.get(key)
        if former is None or not store.table.is_set_of(*former.rows, inputs):
            former = None
            watch_writers()  # before the casts: no write between them and the first report is missed
            for tensor in inputs:  # all of them: another may be a view of a weight, and write by way of it
                store.table.watch(tensor, False)
        freshen([(copy, alias) for copy, alias in zip(chosen, aliases, strict=True) if copy.blocks is None])
        reads = 1 if former is None or store.table.count_passes() > passes else former.reads
        unpacked = [i for i, spec in enumerate(self._specs) if spec.blocks is not None and chosen[i].blocks is None]
        if reads >= PAYS:
            for i in unpacked:
                chosen[i] = packed_copy(chosen[i], aliases[i], self._specs[i].blocks)
            unpacked = []
        if former is not None and former.copies == chosen:
            copy_set = former
        else:
            copy_set = CopySet(chosen, self._indices, inputs, bool(unpacked))
            copy_set.whole_reads = whole_reads(inputs[i] for i in self._whole)
            self._make_room()
            self.sets[key] = copy_set
        copy_set.reads, self.last = reads, copy_set
        copy_set.classify()
        buffers = store.table.buffers_of(*copy_set.rows[:2])
        return self._cast_each_call(weights) if buffers is None else copy_set.use(buffers)

    def _choose(self, weight: Tensor, spec: CopySpec) -> Copy:
        """The copy that the graph is to read: the packed one if its numbers are still the weight's."""
        packed = None if spec.blocks is None else found_copy(weight, spec.form, spec.blocks)
        if packed is not None and is_fresh(packed, weight):
            return packed
        copy = copy_of(weight, spec.form, trial=spec.trial)
        if self._in_place:
            copy.keep_in_place()
        return copy

    def _make_room(self) -> None:
        """Drop the sets of freed weights, each time that the number of sets has doubled."""
        if len(self.sets) >= self._sweep_at:
            for key, copy_set in list(self.sets.items()):
                if all(copy.tensor is None for copy in copy_set.copies):
                    self.sets.pop(key, None)  # another thread may have
            self._sweep_at = 2 * len(self.sets) + 8


class ShardBinding(Binding):
    """The copies that one compiled graph reads of its plain weights, and of the parts of those that are DTensors."""

    def copies(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the copies that the graph reads with these inputs; stale ones are cast first, all in one pass."""
        parts = tuple(map(storages.local_part, inputs))
        sharded = [i for i in self._indices if parts[i] is not inputs[i]]
        if sharded:
            watch_shards()
            # The part of a detached DTensor has a version counter of its own: whoever wrote through one has left no
            # trace. So parts are compared with their copies in each call.
            store.report({storages.storage_address(parts[i]) for i in sharded}, table.PERHAPS_WRITTEN)
        copies = super().copies(parts)
        for i in sharded:
            if inputs[i].requires_grad and self._read is not None:
                store.table.watch(parts[i], True)  # a part itself never requires gradients
        return copies
