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

Found = list[tuple[int, Copy]]


class Loan:
    """The copies that a step may write; `tensors` has those of each weight by its number among `params`.

    From here to `wrote` nothing that shares the weights' memory counts as fresh. The step raises the versions of what
    it writes, weights and copies, and then calls `wrote`. Where it goes into a CUDA graph, the copies stay where they
    are for as long as the weights' memory does.
    """

    def __init__(self, params: Sequence[Tensor], found: Found) -> None:
        self._memories = {copy.memory for _, copy in found}
        for memory in self._memories:
            memory.open_step()
        captured = gpu.capturing(params[i] for i, _ in found)
        # A step may turn out to be skipped on the device: what is lent to the step must be right without it.
        lent = [(i, copy) for i, copy in found if copy.writable() and copy.fresh(None)]
        self.tensors: defaultdict[int, list[Tensor]] = defaultdict(list)
        for i, copy in lent:
            copy.mark = None
            if captured:
                copy.stay()
            if not copy.form.wide and copy.tensor is not None:
                self.tensors[i].append(copy.tensor)
        self._lent = [(copy, copy.buffer, params[i]) for i, copy in lent]
        if not captured:
            gpu.follow(copy for _, copy in found)

    def wrote(self) -> None:
        """The step has rewritten all that was lent from the weights' new values.

        Copies held as float32 are rewritten here. What else shares the memory (a tied weight's copy that could not be
        written, slices of a flat buffer) is out of date.
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
            known = [(copy, weight) for copy, weight in written if copy.memory in proven]
            cast([(copy, weight) for copy, weight in known if copy.form.wide])
            for copy, _ in known:
                copy.rewritten()
            gpu.cast_done([copy for copy, _ in written if copy.tensor is not None])


def lend(params: Sequence[Tensor], known: dict[str, Any] | None = None, same: object = None) -> Loan:
    """The copies of these parameters that may be overwritten now: no backward that is still to come saved them.

    `known` is the caller's, kept between steps; `same`: the same object as in an earlier step, if these are the
    parameters of that step, at their addresses and laid out as they were.
    """
    with lock:
        write_epoch()
        return Loan(params, _look_up(params, {} if known is None else known, same))


def _look_up(params: Sequence[Tensor], known: dict[str, Any], same: object) -> Found:
    """All copies of all parameters, looked up anew where one was made or freed since."""
    before, made, places, former, references = known.get("copies", (None, 0, [], [], []))
    if same is not None and before is same and made == copies_made():
        copies = [reference() for reference in references]
        if None not in copies and former == _storages(map(params.__getitem__, places)):
            return list(zip(places, copies, strict=True))
    copied = known_storages()
    keys = _storages(params) if copied else []
    found = [(i, copy) for i, key in enumerate(keys) if key in copied for copy in copies_of(params[i])]
    places, references = [i for i, _ in found], [weakref.ref(copy) for _, copy in found]
    known["copies"] = same, copies_made(), places, [keys[i] for i in places], references
    return found


def _storages(params: Iterable[Tensor]) -> list[int]:
    return list(map(storages.storage_address, params))
