"""Low-precision copies of weights that compiled graphs read: cast once per update, shared, fresh as far as shown."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.errors import WeightsError
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.torch_private import dispatcher, storages

from . import gpu, memory, writers
from .census import unexplained
from .copies import (
    TRIAL,
    Copy,
    Form,
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

_CLASSES = (Tensor, torch.nn.Parameter, storages.FakeTensor)
_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
_NOTHING: Set[Copy] = frozenset()


class WeightStats(NamedTuple):
    """`bytes` and number of the `copies` held now; `casts`: refresh passes so far.

    `bytes` counts packed forms too, but not the zeros that oneDNN fills their blocks up with.
    """

    bytes: int
    copies: int
    casts: int


class Binding:
    """The copies that one compiled graph reads: slot i holds weight i of each call in `forms[i]`. Thread-safe.

    One set of copies lives for each set of weights that the graph is called with, as blocks compiled one by one share
    a graph, for as long as the weights do. A slot's weight keeps its shape and strides from call to call, as Dynamo's
    guards see to. Which tensor it is, and where its memory lies, may change.
    """

    def __init__(
        self, forms: Sequence[Form], in_place: bool, packed: Sequence[Blocks | None], on_trial: Sequence[bool]
    ) -> None:
        self._forms, self._in_place = tuple(forms), in_place
        self._packed, self._on_trial = tuple(packed), tuple(on_trial)
        self._sets: dict[tuple[int, ...], CopySet] = {}  # by the ids of the weights
        _bindings.add(self)
        self._sweep_at = 8

    def copies(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What the graph reads for this call's weights, up to date. Casts those that were not, all in one pass."""
        ids = tuple(map(id, weights))
        while True:
            before = buffers()
            known = self._sets.get(ids)
            if known is None or not known.fresh(weights):
                return self._refresh(ids, weights)
            forms = self._look(known, weights, before) if known.rechecks else known.forms()
            if buffers() is before:
                return forms
            del forms  # another thread frees or casts them; from here on they may lie idle

    def _look(self, known: CopySet, weights: Sequence[Tensor], before: object) -> list[Tensor]:
        with lock:
            if buffers() is before:
                known.look(weights, _NOTHING)
            return known.forms()

    def _refresh(self, ids: tuple[int, ...], weights: Sequence[Tensor]) -> list[Tensor]:
        """What the graph reads, of a set as it is from now on. Nothing of it is freed or cast meanwhile."""
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
                    return cast_for_capture(_held(ids, weights), self._forms)
                return self._look_at_all(ids, weights, former)

    def _look_at_all(self, ids: tuple[int, ...], weights: Sequence[Tensor], former: CopySet | None) -> list[Tensor]:
        now = write_epoch()
        held = _held(ids, weights)
        members = [copy_of(weight.tensor, form) for weight, form in zip(held, self._forms, strict=True)]
        for copy, weight, on_trial in zip(members, weights, self._on_trial, strict=True):
            copy.in_place |= self._in_place
            if on_trial and copy.tensor is None and not copy.packed:
                copy.trial = TRIAL
            copy.memory.admit(weight)
        set_ranges((each.begin, each.end) for each in memory.memories())
        writers.watch()  # now that there is memory to watch: what dies meanwhile can't be the last
        before = former if former is not None and former.members == members else None
        tables = before.tables if before else {}
        cast = refresh(zip(members, held, self._packed, strict=True), _doubtful(members, held), tables)
        known = CopySet(held, members, self._packed, now, before, tables)
        if former is None:
            self._make_room()
        self._sets[ids] = known
        known.look(weights, cast)
        return known.forms()

    def _make_room(self) -> None:
        """Let go of sets whose weights are no more, each time that the number of sets has doubled."""
        if len(self._sets) >= self._sweep_at:
            for ids, known in list(self._sets.items()):
                if known.gone():
                    del self._sets[ids]
            self._sweep_at = 2 * len(self._sets) + 8


def _held(ids: Sequence[int], weights: Sequence[Tensor]) -> list[Weight]:
    return [Weight(key, storages.alias(weight)) for key, weight in zip(ids, weights, strict=True)]


def _doubtful(members: Sequence[Copy], held: Sequence[Weight]) -> set[Memory]:
    """The memories of which nothing can be proven now: what is cast from them is cast again in the next call."""
    memories = [copy.memory for copy in members]
    found = unexplained(memories, [weight.tensor for weight in held])
    if writers.step_is_running():
        return {*memories}
    return {*found, *(each for each in memories if each.step_open)}


def bind(
    dtypes: Sequence[torch.dtype],
    in_place: bool = False,
    packed: Sequence[Blocks | None] | None = None,
    on_trial: Sequence[bool] | None = None,
    wide: Sequence[bool] | None = None,
) -> Binding:
    """A binding for one compiled graph. `dtypes`: of its copies, which are made at its first call.

    `in_place`: copies keep their addresses whatever happens, for replayed CUDA graphs; a backward that is still to
    come and saved one then raises autograd's error. `packed`: what slots are packed for once that pays. `on_trial`:
    slots whose weights aren't known to be weights, and are cast at each call until they stayed the same for some.
    `wide`: slots whose copies hold their numbers, rounded, as float32.
    """
    nowhere = [False] * len(dtypes)
    forms = map(Form, dtypes, wide or nowhere)
    return Binding(list(forms), in_place, packed or [None] * len(dtypes), on_trial or nowhere)


def hoistable(tensor: Any) -> bool:
    """Whether copies of a weight can be kept across calls; if not, it is cast in the graph.

    It must be dense, on a CPU or CUDA device, of no subclass, have a version counter (inference tensors have none),
    and not be one that FSDP gathers for a while.
    """
    return (
        type(tensor) in _CLASSES
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_floating_point()
        and storages.is_dense(tensor)
        and not tensor.is_inference()
        and not storages.is_managed_by_fsdp(tensor)
    )


def invalidate(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Have the next call cast these weights again: for writes that PyTorch can't know of (see docs/weights.md).

    With a graph that reads one of them, all tensors that it keeps copies of are cast again: its buffers, and what it
    reads from attributes, closures and globals. Raises `WeightsError` for what is neither a module nor tensors.

    >>> import ctypes
    >>> written = ctypes.memset(model.weight.data_ptr(), 0, model.weight.nbytes)
    >>> ampcompile.invalidate(model)
    """
    with lock:
        for copied in _copied_with(model_or_params)[0]:
            copied.written()


def free_copies(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Free the low-precision copies of these weights now, packed forms included; the next call casts them again.

    For a model that is put aside for a while, or moved to another device. It means the same weights as `invalidate`.
    A backward that is still to come keeps what it saved until it has run; what a CUDA graph writes that you captured,
    with a step of `ampcompile.GradScaler` in it, stays. Raises `WeightsError` for what is neither a module nor tensors.

    >>> ampcompile.free_copies(model)
    """
    with lock:
        memories, sets = _copied_with(model_or_params)
        for each in sets:
            each.free()
        for copied in memories:
            copied.written()
            for copy in list(copied.copies):
                copy.free(gone=False)


def weight_stats() -> WeightStats:
    """What the copies of all models cost now: see `WeightStats`.

    >>> y = compiled(x)
    >>> ampcompile.weight_stats()
    WeightStats(bytes=520, copies=2, casts=...)
    """
    with lock:
        held = [size for copy in list(copies.values()) if (size := copy.nbytes())]
        return WeightStats(sum(held), len(held), cast_passes())


def _copied_with(model_or_params: Any) -> tuple[set[Memory], list[CopySet]]:
    """The copied memory of these tensors and of all that is read together with one of them, and the sets of both."""
    copied = {found for tensor in _tensors(model_or_params) if (found := memory.copied_memory_at(tensor)) is not None}
    sets = [each for each in list(memory.sets) if not copied.isdisjoint(each.memories)]
    return copied.union(*(each.memories for each in sets)), sets


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, torch.nn.Module):
        attributes = [value for module in found.modules() for value in vars(module).values()]
        return [*found.parameters(), *found.buffers(), *(value for value in attributes if isinstance(value, Tensor))]
    tensors = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, Iterable) else [found]
    for each in tensors:
        if not isinstance(each, Tensor):
            raise WeightsError(
                f"found {type(each).__name__!r}, expected a torch.nn.Module, a tensor, or several tensors: pass the "
                "model, or model.parameters()"
            )
    return tensors
