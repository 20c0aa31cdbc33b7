"""The copies that an optimizer's step writes together with the weights, so that no graph has to cast them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels import unchanged
from ampcompile.kernels.renewal import CopyPlace, RenewalTable
from ampcompile.kernels.unchanged import Unchanged
from ampcompile.torch_private import storages

from . import gpu
from .copies import Copy, IdleCheck, cast, copies_of
from .freshness import Memory
from .sample import Sample
from .store import store

IndexedCopies = list[tuple[int, Copy]]  # by the indices of their weights in a step's parameters


class Loan:
    """The copies that a step may write; `tensors` has those of each weight by its index in `params`.

    Until `wrote`, no copy of the weights' memory counts as fresh. The step raises the versions of the weights and
    copies that it writes, and then calls `wrote`. If it is captured in a CUDA graph, the copies keep their addresses
    for as long as the weights' memory lives.

    `opened`: the memory of all copies, lent or not. `cache` gets the loan if it can be taken again. `known`: it was.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lent: IndexedCopies,
        opened: set[Memory],
        cache: dict[str, Any],
        known: KnownLoan | None = None,
    ) -> None:
        self._params, self._opened, self._cache, self._known = params, opened, cache, known
        self.tensors: defaultdict[int, list[Tensor]] = defaultdict(list)
        for i, copy in lent:
            if not copy.form.wide and copy.tensor is not None:
                self.tensors[i].append(copy.tensor)
        self._lent = [(i, copy, copy.buffer, params[i]) for i, copy in lent]

    def wrote(self) -> None:
        """Mark the lent copies fresh: the step has written them from the weights' new values.

        Copies held as float32 are written here. Other copies of the memory (a tied weight's copy that could not be
        written, slices of a flat buffer) are stale now.
        """
        if not self._opened:
            return
        with store.lock, torch.inference_mode(False), torch.no_grad():
            if self._known is not None and self._known.close():
                gpu.cast_done([copy for _, copy, *_ in self._lent])
                return
            proven = {memory for memory in self._opened if memory.close_step()}
            written = [
                (copy, weight)
                for _, copy, buffer, weight in self._lent
                # another thread may have cast it meanwhile, from weights of before the step
                if not copy.mark and copy.buffer == buffer
            ]
            fresh = [(copy, weight) for copy, weight in written if copy.memory in proven]
            cast([(copy, weight) for copy, weight in fresh if copy.form.wide])
            for copy, _ in fresh:
                copy.rewritten()
            gpu.cast_done([copy for copy, _ in written if copy.tensor is not None])
            if len(fresh) == len(self._lent):
                lent = [(i, copy, weight) for i, copy, _, weight in self._lent]
                self._cache["loan"] = KnownLoan.of(self._params, lent)


class KnownLoan:
    """A step's loan, taken again with two calls of C++ while nothing changes about its weights and copies but numbers.

    It keeps no copy alive: that is for graphs to do. `lent`: indices of weights in `params`, their copies, the weights.
    """

    def __init__(self, params: Sequence[Tensor], lent: Sequence[tuple[int, Copy, Tensor]]) -> None:
        self._params = list(map(storages.tensor_address, params))
        lent = sorted(lent, key=lambda each: not each[1].places.runs.size)  # `Sample` reads runs first
        copies = [copy for _, copy, _ in lent]
        memories = list(dict.fromkeys(copy.memory for copy in copies))
        sharers = [(sharer, memory) for memory in memories for sharer in memory.sharers]
        weights = [copy.memory.weights[id(weight)] for _, copy, weight in lent]
        sample = Sample(copy.places for copy in copies)
        self._made, self._indices, self._copies = store.made, [i for i, *_ in lent], [weakref.ref(c) for c in copies]
        state = Unchanged(
            tensors=[sharer.impl for sharer, _ in sharers],
            counters=[*(storages.tensor_address(sharer.counter) for sharer, _ in sharers), *(w.impl for w in weights)],
            versions=[sharer.seen for sharer in (*(sharer for sharer, _ in sharers), *weights)],
            weights=[weight.impl for weight in weights],
            addresses=[weight.data_ptr() for *_, weight in lent],
            storages=[memory.key for memory in memories],
            users=[memory.users() for memory in memories],
            runs=sample.runs,
            words=sample.words,
            sampled=sample.read(),
            kept=[(sharer.handle, sharer.counter) for sharer, _ in sharers],
        )
        places = [
            CopyPlace(copy, copy.memory, known.impl, weight.data_ptr(), tensor, copy.form.dtype, len(copy.words))
            for (_, copy, weight), known in zip(lent, weights, strict=True)
            if (tensor := copy.tensor) is not None
        ]
        self._table: RenewalTable | None = RenewalTable(
            state, [sharer for sharer, _ in sharers], [memory for _, memory in sharers], places
        )
        store.loans.add(self)

    @classmethod
    def of(cls, params: Sequence[Tensor], lent: Sequence[tuple[int, Copy, Tensor]]) -> KnownLoan | None:
        """The loan to be taken again; None if it may not: with packed copies, or weights that graphs don't read."""
        plain = all(
            copy.tensor is not None and not copy.packed and not copy.form.wide and id(weight) in copy.memory.weights
            for _, copy, weight in lent
        )
        return cls(params, lent) if plain and lent and unchanged.available() else None

    def lend(self, params: Sequence[Tensor]) -> Loan | None:
        """Take the loan again; None if anything has changed, or a backward waits for a copy."""
        copies = [copy for reference in self._copies if (copy := reference()) is not None]
        if self._made != store.made or len(copies) < len(self._copies) or gpu.capturing(params[:1]):
            return None
        table = self._table
        if table is None or list(map(storages.tensor_address, params)) != self._params or table.find_stale():
            return None
        if not table.owned_as_noted():
            if not IdleCheck(copies)():
                return None
            table.note_owners()
        table.open_step()
        store.begin_epoch()
        gpu.follow(copies)
        lent = list(zip(self._indices, copies, strict=True))
        return Loan(params, lent, {copy.memory for copy in copies}, {}, self)

    def close(self) -> bool:
        """End the step; False if something else happened meanwhile."""
        store.begin_epoch()
        return self._table is not None and self._table.close_step()

    def forget(self) -> None:
        """Stop tracking the weights: the loan isn't taken again."""
        self._table = None


def lend(params: Sequence[Tensor], cache: dict[str, Any] | None = None, token: object = None) -> Loan:
    """Lend the copies of these parameters that may be overwritten now: no pending backward saved them.

    `cache`: a dict that the caller keeps between steps. `token`: an object; with the same one as in the last step the
    caller promises the same parameters, at the same addresses and in the same layouts.
    """
    cache = {} if cache is None else cache
    with store.lock:
        store.write_epoch()
        known = cache.pop("loan", None)
        if known is not None and (loan := known.lend(params)) is not None:
            cache["loan"] = known
            return loan
        return _open(params, _look_up(params, cache, token), cache)


def _open(params: Sequence[Tensor], copies: IndexedCopies, cache: dict[str, Any]) -> Loan:
    """Lend of these copies those that may be written."""
    opened = {copy.memory for _, copy in copies}
    for memory in opened:
        memory.open_step()
    captured = gpu.capturing(params[i] for i, _ in copies)
    # The device may skip the step, so only copies that are right without it are lent.
    lent = [(i, copy) for i, copy in copies if copy.writable() and copy.fresh(None)]
    for _, copy in lent:
        copy.mark = 0
        if captured:
            store.captured.add(copy)
    if not captured:
        gpu.follow(copy for _, copy in copies)
    return Loan(params, lent, opened, {} if captured or len(lent) < len(copies) else cache)


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
