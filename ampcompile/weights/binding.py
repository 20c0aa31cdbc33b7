"""The copies that a compiled graph reads: found, proven fresh or cast before each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher, storages
from ampcompile.torch_private.storages import has_memory

from . import gpu
from .copies import TRIAL, Copy, cast_for_capture, copy_of, refresh
from .copy_set import CopySet
from .freshness import Memory, unexplained
from .remains import MixedSet, slot_of
from .spec import CopySpec
from .store import store, whole_reads
from .writers import watch


class Binding:
    """The copies that one compiled graph reads, as its `specs` describe them. Thread-safe.

    Each set of weights that the graph is called with has a set of copies, for as long as these weights live: blocks
    that are compiled one by one share a graph. A slot's weight has the same shape and strides in each call, as Dynamo's
    guards ensure; the tensor object and its address may change.

    `in_place`: copies keep their addresses, as replayed CUDA graphs need; a pending backward that saved a copy which
    is then overwritten raises autograd's error. `whole`: indices of the weights that the graph reads themselves, not
    only copies of them.
    """

    def __init__(self, specs: Sequence[CopySpec], in_place: bool = False, whole: Sequence[int] = ()) -> None:
        self._specs, self._in_place, self._whole = specs, in_place, whole
        self._indices = [spec.weight for spec in specs]
        self._sets: dict[tuple[int, ...], CopySet] = {}  # by the ids of the weights
        store.bindings.add(self)
        self._sweep_at = 8

    def copies(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies that the graph reads with these inputs; stale ones are cast first, all in one pass."""
        weights = [inputs[i] for i in self._indices]
        ids = tuple(map(id, weights))
        while True:
            before = store.buffers
            copy_set = self._sets.get(ids)
            if copy_set is None or not copy_set.fresh(weights):
                return self._refresh(ids, weights, inputs)
            forms = self._look(copy_set, weights, before) if copy_set.rechecks else copy_set.forms()
            if store.buffers is before:
                return forms
            del forms  # another thread frees or casts them: our references must not make them look in use

    def whole_reads(self) -> dict[int, Any]:
        """The weights themselves, not copies, that the graph has read in its calls: see the function `whole_reads`."""
        return {key: ref for copy_set in list(self._sets.values()) for key, ref in copy_set.whole_reads.items()}

    def _look(self, copy_set: CopySet, weights: Sequence[Tensor], before: object) -> list[Tensor]:
        with store.lock:
            if store.buffers is before:
                copy_set.look(weights, frozenset())
            return copy_set.forms()

    def _refresh(self, ids: tuple[int, ...], weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Renew or replace the set, and return what the graph reads; no other thread frees or casts it meanwhile."""
        with store.lock:
            if store.casting:  # the last pass was interrupted: its copies have no mark, so they are cast
                store.begin_epoch()
                store.casting = False
            former = self._sets.get(ids)
            if former is not None and not store.running and former.renew(weights, store.write_epoch()):
                return former.forms()
            with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
                if gpu.capturing(weights):
                    return self._cast_for_capture(weights)
                return self._replace_set(ids, weights, inputs, former)

    def _cast_for_capture(self, weights: Sequence[Tensor]) -> list[Tensor]:
        kept = [(weight, spec.form) for weight, spec in zip(weights, self._specs, strict=True) if has_memory(weight)]
        forms = iter(cast_for_capture([storages.alias(weight) for weight, _ in kept], [form for _, form in kept]))
        return [
            next(forms) if has_memory(weight) else slot_of(weight, spec).tensor
            for weight, spec in zip(weights, self._specs, strict=True)
        ]

    def _replace_set(
        self, ids: tuple[int, ...], weights: Sequence[Tensor], inputs: Sequence[Tensor], former: CopySet | None
    ) -> list[Tensor]:
        """Examine all weights, cast those whose copies are stale, and put a new set in place of `former`."""
        now = store.write_epoch()
        released = {i: slot_of(w, self._specs[i]) for i, w in enumerate(weights) if not has_memory(w)}
        places = [i for i in range(len(weights)) if i not in released]
        specs, blocks = [self._specs[i] for i in places], [self._specs[i].blocks for i in places]
        aliases = [storages.alias(weights[i]) for i in places]  # they keep the memory if another thread assigns `.data`
        members = [copy_of(alias, spec.form) for alias, spec in zip(aliases, specs, strict=True)]
        for copy, place, spec in zip(members, places, specs, strict=True):
            copy.in_place |= self._in_place
            if spec.trial and copy.tensor is None and not copy.packed:
                copy.trial = TRIAL
            copy.memory.admit(weights[place])
        store.set_ranges((memory.begin, memory.end) for memory in store.watched())
        watch()  # after `copy_of`: another memory freed meanwhile isn't the last, so the patches stay
        before = former if former is not None and former.members == members else None
        tables = before.tables if before else {}
        cast = refresh(zip(members, aliases, blocks, strict=True), _doubtful(members, aliases), tables)
        content = [ids[i] for i in places], aliases, members, blocks, now, before, tables
        copy_set = MixedSet(released, places, *content) if released else CopySet(*content)
        copy_set.whole_reads = former.whole_reads if former is not None else whole_reads(inputs[i] for i in self._whole)
        if former is None:
            self._make_room()
        self._sets[ids] = copy_set
        copy_set.look(weights, cast)
        return copy_set.forms()

    def _make_room(self) -> None:
        """Drop the sets of freed weights, each time that the number of sets has doubled."""
        if len(self._sets) >= self._sweep_at:
            for ids, copy_set in list(self._sets.items()):
                if copy_set.gone():
                    del self._sets[ids]
            self._sweep_at = 2 * len(self._sets) + 8


def _doubtful(members: Sequence[Copy], aliases: Sequence[Tensor]) -> set[Memory]:
    """Memories whose copies can't be proven fresh: what is cast from them is cast again in the next call."""
    memories = [copy.memory for copy in members]
    shared = unexplained(memories, aliases)
    if store.running:
        return {*memories}
    return {*shared, *(record for record in memories if record.step_open)}
