"""Copies lent to an optimizer's step, which writes them together with the weights."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import storages

from . import gpu
from .copies import Copy, cast, copies_made, copies_of
from .memory import known_storages, lock, write_epoch

IndexedCopies = list[tuple[int, Copy]]  # by the indices of their weights in a step's parameters


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
            copy.mark = None
            if captured:
                copy.stay()
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
        with lock, torch.inference_mode(False), torch.no_grad():
            proven = {memory for memory in self._memories if memory.close_step()}
            written = [
                (copy, weight)
                for copy, buffer, weight in self._lent
                # another thread may have cast it meanwhile, from weights of before the step
                if copy.mark is None and copy.buffer is buffer
            ]
            fresh = [(copy, weight) for copy, weight in written if copy.memory in proven]
            cast([(copy, weight) for copy, weight in fresh if copy.form.wide])
            for copy, _ in fresh:
                copy.rewritten()
            gpu.cast_done([copy for copy, _ in written if copy.tensor is not None])


def lend(params: Sequence[Tensor], cache: dict[str, Any] | None = None, token: object = None) -> Loan:
    """Lend the copies of these parameters that may be overwritten now: no pending backward saved them.

    `cache` is the caller's, kept between steps; `token`: the token object as in an earlier step if these are the
    parameters of that step, at their addresses and laid out as they were.
    """
    with lock:
        write_epoch()
        return Loan(params, _look_up(params, {} if cache is None else cache, token))


def _look_up(params: Sequence[Tensor], cache: dict[str, Any], token: object) -> IndexedCopies:
    """Return all copies of all parameters; look them up again if one was made or freed since."""
    last_token, made, places, keys, references = cache.get("copies", (None, 0, [], [], []))
    if token is not None and last_token is token and made == copies_made():
        copies = [reference() for reference in references]
        if None not in copies and keys == _storages(map(params.__getitem__, places)):
            return list(zip(places, copies, strict=True))
    copied = known_storages()
    keys = _storages(params) if copied else []
    indexed = [(i, copy) for i, key in enumerate(keys) if key in copied for copy in copies_of(params[i])]
    places, references = [i for i, _ in indexed], [weakref.ref(copy) for _, copy in indexed]
    cache["copies"] = token, copies_made(), places, [keys[i] for i in places], references
    return indexed


def _storages(params: Iterable[Tensor]) -> list[int]:
    return list(map(storages.storage_address, params))
