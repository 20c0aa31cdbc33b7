"""The users of copies: compiled graphs, which read them, and optimizer steps, which write them with the weights."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import dispatcher, storages
from ampcompile.torch_private.storages import has_memory

from . import gpu
from .copies import TRIAL, Copy, cast, cast_for_capture, copies_of, copy_of, refresh
from .copy_set import CopySet
from .freshness import Memory, unexplained
from .remains import MixedSet, slot_of
from .spec import CopySpec
from .store import store, whole_reads
from .writers import watch

IndexedCopies = list[tuple[int, Copy]]  # by the indices of their weights in a step's parameters


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


class Loan:
    """The copies that a step may write; `tensors` has those of each weight by its index in `params`.

    Until `wrote`, no copy of the weights' memory counts as fresh. The step raises the versions of the weights and
    copies that it writes, and then calls `wrote`. If it is captured in a CUDA graph, the copies keep their addresses
    for as long as the weights' memory lives.
    """

    def __init__(self, params: Sequence[Tensor], copies: IndexedCopies) -> None:
        self._memories = {copy.memory for _, copy in copies}
        for memory in self._memories:
            memory.open_step()
        captured = gpu.capturing(params[i] for i, _ in copies)
        # The device may skip the step, so only copies that are right without it are lent.
        lent = [(i, copy) for i, copy in copies if copy.writable() and copy.fresh(None)]
        self.tensors: defaultdict[int, list[Tensor]] = defaultdict(list)
        for i, copy in lent:
            copy.mark = 0
            if captured:
                store.captured.add(copy)
            if not copy.form.wide and copy.tensor is not None:
                self.tensors[i].append(copy.tensor)
        self._lent = [(copy, copy.buffer, params[i]) for i, copy in lent]
        if not captured:
            gpu.follow(copy for _, copy in copies)

    def wrote(self) -> None:
        """Mark the lent copies fresh: the step has written them from the weights' new values.

        Copies held as float32 are written here. Other copies of the memory (a tied weight's copy that could not be
        written, slices of a flat buffer) are stale now.
        """
        if not self._memories:
            return
        with store.lock, torch.inference_mode(False), torch.no_grad():
            proven = {memory for memory in self._memories if memory.close_step()}
            written = [
                (copy, weight)
                for copy, buffer, weight in self._lent
                # another thread may have cast it meanwhile, from weights of before the step
                if not copy.mark and copy.buffer == buffer
            ]
            fresh = [(copy, weight) for copy, weight in written if copy.memory in proven]
            cast([(copy, weight) for copy, weight in fresh if copy.form.wide])
            for copy, _ in fresh:
                copy.rewritten()
            gpu.cast_done([copy for copy, _ in written if copy.tensor is not None])


def lend(params: Sequence[Tensor], cache: dict[str, Any] | None = None, token: object = None) -> Loan:
    """Lend the copies of these parameters that may be overwritten now: no pending backward saved them.

    `cache`: a dict that the caller keeps between steps. `token`: an object; with the same one as in the last step the
    caller promises the same parameters, at the same addresses and in the same layouts.
    """
    with store.lock:
        store.write_epoch()
        return Loan(params, _look_up(params, {} if cache is None else cache, token))


def _look_up(params: Sequence[Tensor], cache: dict[str, Any], token: object) -> IndexedCopies:
    """Return all copies of all parameters; look them up again if one was made or freed since."""
    last_token, made, places, keys, references = cache.get("copies", (None, 0, [], [], []))
    if token is not None and last_token is token and made == store.made:
        copies = [reference() for reference in references]
        if None not in copies and keys == _storages(map(params.__getitem__, places)):
            return list(zip(places, copies, strict=True))
    copied = set(store.memories)
    keys = _storages(params) if copied else []
    indexed = [(i, copy) for i, key in enumerate(keys) if key in copied for copy in copies_of(params[i])]
    places, references = [i for i, _ in indexed], [weakref.ref(copy) for _, copy in indexed]
    cache["copies"] = token, store.made, places, [keys[i] for i in places], references
    return indexed


def _storages(params: Iterable[Tensor]) -> list[int]:
    return list(map(storages.storage_address, params))
