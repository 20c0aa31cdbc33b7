"""Weights without memory: what `release_masters` left of them, and how graphs read that."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ampcompile.dtypes import short_name
from ampcompile.errors import ReleasedError
from ampcompile.torch_private import storages

from .copies import Copy, Packed
from .copy_set import CopySet
from .spec import CopySpec, Form
from .store import store


def refusal(what: str) -> str:
    """The text of the errors where something needs numbers that were freed."""
    return (
        f"found {what}, but ampcompile.release_masters freed float32 weights; expected only calls of graphs that were "
        "compiled and called before. ampcompile.release_masters(model).restore(checkpoint) gives the numbers back; "
        "release_masters(model, keep=[name]) keeps those of a weight or module."
    )


class Remains:
    """A weight without memory and its copies, which nothing can make stale. They go with the weight."""

    def __init__(self, name: str, weight: Tensor, copies: Mapping[Form, Copy]) -> None:
        self.name, self.copies = name, copies
        key = id(weight)
        # A weak reference also keeps `swap_tensors` from giving this tensor another's content.
        self.weight = weakref.ref(weight, lambda _: forget(key))
        for copy in copies.values():
            copy.memory.copies.discard(copy)  # so that it isn't freed with the memory


def forget(key: int) -> None:
    """Free what is left of a weight that is freed itself, or has memory again."""
    if (record := store.released.pop(key, None)) is not None:
        store.released_epoch = object()
        for copy in record.copies.values():
            copy.free(gone=True)
        store.forget_with_the_last()


def record_of(weight: Tensor) -> Remains | None:
    """Return what is left of a weight that was released; None for other tensors."""
    record = store.released.get(id(weight))
    return record if record is not None and record.weight() is weight and not storages.has_memory(weight) else None


def slot_of(weight: Tensor, spec: CopySpec) -> Any:
    """Return a slot, whose `tensor` a graph reads for a released weight. Raises ReleasedError if none was kept."""
    record = record_of(weight)
    copy = None if record is None else record.copies.get(spec.form)
    if copy is not None and (copy.tensor is not None or spec.blocks in copy.packed):
        return copy if spec.blocks is None else Packed(copy, spec.blocks)
    name, dtype = "a weight" if record is None else record.name, short_name(spec.form.dtype)
    raise ReleasedError(refusal(f"a graph that reads {name} as {dtype}, in a layout that no graph read before"))


class MixedSet(CopySet):
    """The tensors that a graph reads of some weights: fixed ones of those released, copies of the others.

    `released`: the slots by the weights' places; `places`: those of the others, which `content` describes.
    """

    def __init__(self, released: Mapping[int, Any], places: Sequence[int], *content: Any) -> None:
        self._fixed, self._places, self._released_epoch = released, places, store.released_epoch
        super().__init__(*content)

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Return True if the released weights are as they were left, and none of the others was written."""
        return self._as_left(weights) and super().fresh(self._others_of(weights))

    def renew(self, weights: Sequence[Tensor], now: object) -> bool:
        """Cast the written weights if nothing else changed."""
        return self._as_left(weights) and super().renew(self._others_of(weights), now)

    def look(self, weights: Sequence[Tensor], cast: Collection[Copy]) -> None:
        """Look for unreported writes to the others."""
        super().look(self._others_of(weights), cast)

    def forms(self) -> list[Any]:
        """The tensors that the graph reads in this call."""
        tensors = {place: slot.tensor for place, slot in self._fixed.items()}
        tensors |= zip(self._places, super().forms(), strict=True)
        return [tensors[place] for place in range(len(tensors))]

    def gone(self) -> bool:
        """Return True if a weight was freed, or one was released or restored since."""
        return self._released_epoch is not store.released_epoch or super().gone()

    def _as_left(self, weights: Sequence[Tensor]) -> bool:
        released = map(weights.__getitem__, self._fixed)
        return self._released_epoch is store.released_epoch and True not in map(storages.has_memory, released)

    def _others_of(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return list(map(weights.__getitem__, self._places))
