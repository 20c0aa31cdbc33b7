"""Bindings from compiled graphs to the low-precision copies they read, and the public functions on these copies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.errors import WeightsError
from ampcompile.torch_private import dispatcher, storages

from . import gpu, memory, writers
from .census import unexplained
from .copies import (
    TRIAL,
    Copy,
    Weight,
    buffers,
    cast_for_capture,
    cast_passes,
    copies,
    copy_of,
    interrupted,
    recover,
    refresh,
)
from .copy_set import CopySet
from .memory import Memory, lock, write_epoch
from .ranges import set_ranges
from .spec import CopySpec

_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
_NOTHING: Set[Copy] = frozenset()


class WeightStats(NamedTuple):
    """`bytes` and number of the `copies` held now; `casts`: refresh passes so far.

    `bytes` counts packed forms too, but not the zeros that oneDNN pads their blocks with.
    """

    bytes: int
    copies: int
    casts: int


class Binding:
    """The copies that one compiled graph reads, as its `specs` describe them. Thread-safe.

    Each set of weights that the graph is called with has a set of copies, for as long as these weights live: blocks
    that are compiled one by one share a graph. A slot's weight has the same shape and strides in each call, as Dynamo's
    guards ensure; the tensor object and its address may change.

    `in_place`: copies keep their addresses, as replayed CUDA graphs need; a pending backward that saved a copy which
    is then overwritten raises autograd's error.
    """

    def __init__(self, specs: Sequence[CopySpec], in_place: bool = False) -> None:
        self._specs, self._in_place = specs, in_place
        self._indices, self._blocks = [spec.weight for spec in specs], [spec.blocks for spec in specs]
        self._sets: dict[tuple[int, ...], CopySet] = {}  # by the ids of the weights
        _bindings.add(self)
        self._sweep_at = 8

    def copies(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies that the graph reads with these inputs; stale ones are cast first, all in one pass."""
        weights = [inputs[i] for i in self._indices]
        ids = tuple(map(id, weights))
        while True:
            before = buffers()
            copy_set = self._sets.get(ids)
            if copy_set is None or not copy_set.fresh(weights):
                return self._refresh(ids, weights)
            forms = self._look(copy_set, weights, before) if copy_set.rechecks else copy_set.forms()
            if buffers() is before:
                return forms
            del forms  # another thread frees or casts them: our references must not make them look in use

    def _look(self, copy_set: CopySet, weights: Sequence[Tensor], before: object) -> list[Tensor]:
        with lock:
            if buffers() is before:
                copy_set.look(weights, _NOTHING)
            return copy_set.forms()

    def _refresh(self, ids: tuple[int, ...], weights: Sequence[Tensor]) -> list[Tensor]:
        """Renew or replace the set, and return what the graph reads; no other thread frees or casts it meanwhile."""
        with lock:
            if interrupted():
                memory.begin_epoch()
                recover()
            former = self._sets.get(ids)
            if former is not None and not writers.step_is_running():
                with torch.no_grad(), dispatcher.without_modes():
                    if former.renew(weights, write_epoch()):
                        return former.forms()
            with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
                if gpu.capturing(weights):
                    return cast_for_capture(_alias_weights(ids, weights), self._specs)
                return self._look_at_all(ids, weights, former)

    def _look_at_all(self, ids: tuple[int, ...], weights: Sequence[Tensor], former: CopySet | None) -> list[Tensor]:
        now = write_epoch()
        aliases = _alias_weights(ids, weights)
        members = [copy_of(weight.tensor, spec.form) for weight, spec in zip(aliases, self._specs, strict=True)]
        for copy, weight, spec in zip(members, weights, self._specs, strict=True):
            copy.in_place |= self._in_place
            if spec.trial and copy.tensor is None and not copy.packed:
                copy.trial = TRIAL
            copy.memory.admit(weight)
        set_ranges((record.begin, record.end) for record in memory.memories())
        writers.watch()  # after `copy_of`: another memory freed meanwhile isn't the last, so the patches stay
        before = former if former is not None and former.members == members else None
        tables = before.tables if before else {}
        cast = refresh(zip(members, aliases, self._blocks, strict=True), _doubtful(members, aliases), tables)
        copy_set = CopySet(aliases, members, self._blocks, now, before, tables)
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


def _alias_weights(ids: Sequence[int], weights: Sequence[Tensor]) -> list[Weight]:
    return [Weight(key, storages.alias(weight)) for key, weight in zip(ids, weights, strict=True)]


def _doubtful(members: Sequence[Copy], aliases: Sequence[Weight]) -> set[Memory]:
    """Memories whose copies can't be proven fresh: what is cast from them is cast again in the next call."""
    memories = [copy.memory for copy in members]
    shared = unexplained(memories, [weight.tensor for weight in aliases])
    if writers.step_is_running():
        return {*memories}
    return {*shared, *(record for record in memories if record.step_open)}


def invalidate(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Make the next call cast these weights again: for writes that PyTorch can't detect (see docs/weights.md).

    A graph that reads one of them casts all tensors that it keeps copies of again, also buffers and tensors from
    attributes, closures and globals. Raises `WeightsError` if the argument is neither a module nor tensors.

    >>> import ctypes
    >>> written = ctypes.memset(model.weight.data_ptr(), 0, model.weight.nbytes)
    >>> ampcompile.invalidate(model)
    """
    with lock:
        for record in _copied_with(model_or_params)[0]:
            record.written()


def free_copies(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Free the low-precision copies of these weights now, packed forms included; the next call casts them again.

    For a model that is put aside for a while, or moved to another device. It covers the same weights as `invalidate`.
    A pending backward keeps the copies it saved until it has run. If you captured a step of `ampcompile.GradScaler` in
    a CUDA graph, the copies that the graph writes stay. Raises `WeightsError` as `invalidate` does.

    >>> ampcompile.free_copies(model)
    """
    with lock:
        memories, sets = _copied_with(model_or_params)
        for copy_set in sets:
            copy_set.free()
        for record in memories:
            record.written()
            for copy in list(record.copies):
                copy.free(gone=False)


def weight_stats() -> WeightStats:
    """Return the bytes, number and refresh passes of the copies of all models: see `WeightStats`.

    >>> y = compiled(x)
    >>> ampcompile.weight_stats()
    WeightStats(bytes=520, copies=2, casts=...)
    """
    with lock:
        sizes = [size for copy in list(copies.values()) if (size := copy.nbytes())]
        return WeightStats(sum(sizes), len(sizes), cast_passes())


def _copied_with(model_or_params: Any) -> tuple[set[Memory], list[CopySet]]:
    """Return the copied memory of these tensors and of all tensors that a set reads with them, and those sets."""
    copied = {record for tensor in _tensors(model_or_params) if (record := memory.copied_memory_at(tensor)) is not None}
    sets = [copy_set for copy_set in list(memory.sets) if not copied.isdisjoint(copy_set.memories)]
    return copied.union(*(copy_set.memories for copy_set in sets)), sets


def _tensors(source: Any) -> list[Tensor]:
    if isinstance(source, torch.nn.Module):
        attributes = [value for module in source.modules() for value in vars(module).values()]
        return [*source.parameters(), *source.buffers(), *(value for value in attributes if isinstance(value, Tensor))]
    tensors = [source] if isinstance(source, Tensor) else list(source) if isinstance(source, Iterable) else [source]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise WeightsError(
                f"found {type(tensor).__name__!r}, expected a torch.nn.Module, a tensor, or several tensors: pass the "
                "model, or model.parameters()"
            )
    return tensors
