"""The copies of all weights of one graph, and the one question of the hot path: are they fresh?"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from operator import is_

import numpy as np
from torch import Tensor

from . import compat_weights as compat
from . import weights_gpu as gpu
from .weights_copy import Copy, Weight, holders, passes
from .weights_memory import moment
from .weights_sample import words

Rechecks = list[tuple[list[int], gpu.Recheck]]
_NO_VERSION = (None, -1)  # of a tensor without a counter, which always looks changed


class CopySet:
    """Fresh copies of some weights, and everything that has to stay as it is for them to stay fresh.

    `now`: the `moment` before any of the weights was looked at; None: fresh for this once only.
    `before`: the set that this one takes the place of.
    """

    def __init__(
        self, weights: Sequence[Weight], members: Sequence[Copy], now: object, before: CopySet | None = None
    ) -> None:
        self.ids = [weight.key for weight in weights]
        self.members = members
        self.tensors = [copy.tensor for copy in members]
        self._references = Counter(map(id, self.tensors))
        self._passes = passes()
        self._versions = [copy.counters.get(key, _NO_VERSION)[1] for copy, key in zip(members, self.ids, strict=True)]
        self._moment = None if -1 in self._versions else now
        distinct = list({id(copy): copy for copy in members}.values())
        tied = [pair for copy in distinct if len(copy.counters) > 1 for pair in copy.counters.values()]
        self._tied, self._tied_versions = [counter for counter, _ in tied], [seen for _, seen in tied]
        self._storages = list({copy.memory.storage.cdata for copy in distinct})
        self._addresses = [weight.tensor.data_ptr() for weight in weights]
        self._places = np.concatenate([np.empty(0, np.int64), *(copy.places for copy in distinct)])
        self._words = b"".join(copy.words for copy in distinct)
        alike = before and before._addresses == self._addresses and all(map(is_, before.tensors, self.tensors))
        self.rechecks: Rechecks = (
            before.rechecks if before and alike else self._find_rechecks([weight.tensor for weight in weights])
        )
        holders[id(self)] = weakref.ref(self, functools.partial(_dropped, id(self)))

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same weights and none was written. About 0.2 us a weight."""
        if self._moment is not moment() or self._passes != passes() or self.ids != list(map(id, weights)):
            return False
        try:
            if self._versions != list(map(compat.version, weights)):
                return False
        except RuntimeError:  # an inference tensor where another tensor had been
            return False
        if self._tied and self._tied_versions != list(map(compat.version, self._tied)):
            return False
        held = list(map(compat.hold_storage, self._storages))  # the words that follow are in memory that stays
        if None in held or self._addresses != list(map(Tensor.data_ptr, weights)):
            return False
        return words(self._places) == self._words and not (self.rechecks and gpu.capturing(weights))

    def look(self, weights: Sequence[Tensor]) -> None:
        """On GPUs, look for writes that left no trace, and cast what was written, ahead of the call that follows."""
        for places, recheck in self.rechecks:
            if len(places) == len(self.tensors):
                recheck.look(self.tensors, weights)
            else:
                recheck.look([self.tensors[i] for i in places], [weights[i] for i in places])

    def _find_rechecks(self, weights: Sequence[Tensor]) -> Rechecks:
        found: Rechecks = []
        for device in dict.fromkeys(weight.device for weight in weights if weight.is_cuda):
            places = [i for i, weight in enumerate(weights) if weight.device == device]
            members = [self.members[i] for i in places]
            recheck = gpu.Recheck(device, [copy.tensor for copy in members], functools.partial(_all_writable, members))
            found.append((places, recheck))
        return found

    def gone(self) -> bool:
        """Whether a weight was freed."""
        return any(map(compat.storage_is_gone, self._storages))

    def references_to(self, buffer: Tensor) -> int:
        """How many references to a buffer are this set's."""
        return self._references[id(buffer)]


def _all_writable(members: Sequence[Copy]) -> bool:
    return all(copy.writable() for copy in members)


def _dropped(key: int, _: object) -> None:
    del holders[key]
