"""Low-precision copies of weights: one owner, cast once per update, never stale, never under a pending backward."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat_weights as compat
from .kernels.cast_many import cast_many_
from .weights_memory import known_memory_of, memory_of, moment
from .weights_sample import Sample

_MAX_SETS = 4  # sets of weights that one graph keeps copies of, when it is called with several in turn
_MAX_OBJECTS = 8  # tensor objects with the same memory whose versions are remembered
_TYPES = (Tensor, torch.nn.Parameter, compat.FakeTensor)
_NEVER = (None, -1)  # the counter and version of a tensor that has none: it never looks unchanged

_lock = threading.RLock()
_copies: weakref.WeakValueDictionary[tuple, _Copy] = weakref.WeakValueDictionary()
_sets: weakref.WeakSet[_Set] = weakref.WeakSet()
_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
_casts = 0


class WeightStats(NamedTuple):
    """What the copies cost: their bytes and number now, and the refresh passes so far."""

    bytes: int
    copies: int
    casts: int


class _Copy:
    """A weight in low precision, shared by all graphs that read it."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.memory = memory_of(weight)
        self.mark: object = None
        self.counters: dict[int, tuple[Tensor, int]] = {}
        self.in_place = self.lent = False
        self.allocate(weight, dtype)

    def allocate(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.tensor = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)
        self.storage = compat.storage_key(self.tensor)
        self.idle = self.owners()

    def owners(self) -> tuple[int, int, int]:
        """Who holds the buffer: its tensor in C++, its storage (views do), its tensor in Python outside of sets."""
        in_sets = sum(known.held.get(id(self.tensor), 0) for known in _sets)
        return (
            compat.tensor_users(self.tensor),
            compat.storage_users(self.storage),
            sys.getrefcount(self.tensor) - in_sets,
        )

    def writable(self) -> bool:
        """Whether the buffer may be overwritten: nothing saved it for a backward that is still to come."""
        return self.in_place or self.owners() == self.idle

    def fresh(self, weight: Tensor) -> bool:
        return (
            self.mark is self.memory.mark
            and id(weight) in self.counters
            and all(counter._version == seen for counter, seen in self.counters.values())
            and self.sample.unchanged()
        )

    def settle(self, weight: Tensor) -> None:
        """What is about to be cast, or was just written, is what the weight holds now."""
        counter = compat.counter_of(weight)
        self.mark = self.memory.mark if counter is not None else None
        if counter is not None:
            if len(self.counters) >= _MAX_OBJECTS:
                self.counters.clear()
            self.counters[id(weight)] = (counter, 0)
            self.counters = {key: (c, c._version) for key, (c, _) in self.counters.items()}
        self.sample = Sample.of(weight)


class _Set:
    """The copies for one set of weights, and everything that has to be as it was for them to be fresh."""

    def __init__(self, weights: Sequence[Tensor], copies: Sequence[_Copy], now: object) -> None:
        self.moment, self.casts = now, _casts
        self.ids = list(map(id, weights))
        self.copies = copies
        self.tensors = [copy.tensor for copy in copies]
        self.held = Counter(map(id, self.tensors))
        distinct = {id(copy): copy for copy in copies}.values()
        self.storages = list({copy.memory.storage.cdata for copy in distinct})
        self.sample = Sample.joined(copy.sample for copy in distinct)
        tied = [each for copy in distinct if len(copy.counters) > 1 for each in copy.counters.values()]
        self.tied, self.tied_versions = [counter for counter, _ in tied], [seen for _, seen in tied]
        self.versions = [copy.counters.get(id(weight), _NEVER)[1] for copy, weight in zip(copies, weights, strict=True)]
        self.addresses = list(map(Tensor.data_ptr, weights))
        _sets.add(self)

    def fresh(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same weights and none was written; about 30 us for 150 of them."""
        if self.moment is not moment() or self.casts != _casts or self.ids != list(map(id, weights)):
            return False
        if self.versions != list(map(compat.version, weights)):
            return False
        if self.tied and self.tied_versions != list(map(compat.version, self.tied)):
            return False
        held = list(map(compat.hold_storage, self.storages))  # so that the sample reads memory that is there
        return None not in held and self.addresses == list(map(Tensor.data_ptr, weights)) and self.sample.unchanged()

    def gone(self) -> bool:
        """Whether one of the weights was freed."""
        return any(map(compat.storage_is_gone, self.storages))


class Binding:
    """The copies that one compiled graph reads: slot `i` is weight `i` of each call in `dtypes[i]`.

    Thread-safe. A slot's weight keeps its shape and strides from call to call (Dynamo's guards see to that);
    which tensor it is, and where its memory is, may change.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], in_place: bool) -> None:
        self._dtypes, self._in_place = tuple(dtypes), in_place
        self._recent: tuple[_Set, ...] = ()
        _bindings.add(self)

    def copies(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The copies of this call's weights, up to date; casts those that were not, all in one pass.

        The list is the binding's own: read it, don't change it.
        """
        for known in self._recent:
            if known.fresh(weights):
                return known.tensors
        return self._refresh(weights)

    def _refresh(self, weights: Sequence[Tensor]) -> list[Tensor]:
        with _lock, torch.inference_mode(False), torch.no_grad():
            _sweep()
            now = moment()
            copies = [_copy_of(weight, dtype) for weight, dtype in zip(weights, self._dtypes, strict=True)]
            for copy, weight in zip(copies, weights, strict=True):
                copy.in_place |= self._in_place
                copy.memory.trainable |= weight.requires_grad
            _cast({id(c): (c, w) for c, w in zip(copies, weights, strict=True) if not c.fresh(w)}.values())
            known = _Set(weights, copies, now)
            others = [other for other in self._recent if other.ids != known.ids]
            self._recent = (known, *others[: _MAX_SETS - 1])
            return known.tensors

    def forget_freed(self) -> None:
        """Let go of the copies of weights that are no more."""
        if any(known.gone() for known in self._recent):
            self._recent = tuple(known for known in self._recent if not known.gone())


def bind(weights: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], in_place: bool = False) -> Binding:
    """One binding for a compiled graph. Copies are made at the first call: `weights` may be fake or unknown here.

    `in_place`: copies keep their addresses for good, as a replayed CUDA graph needs; autograd then raises where
    a backward is still to come that saved one.
    """
    assert len(weights) == len(dtypes)
    return Binding(dtypes, in_place)


def hoistable(tensor: Any) -> bool:
    """Whether a copy of this weight can be kept: dense, of a plain class, in memory that stays and is tracked."""
    return (
        type(tensor) in _TYPES
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_floating_point()
        and compat.is_dense(tensor)
        and not tensor.is_inference()
        and not compat.is_managed_by_fsdp(tensor)
    )


def invalidate(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Have the next call cast these weights again: for writes that PyTorch can't know of (see docs/weights.md)."""
    for tensor in _tensors(model_or_params):
        if (memory := known_memory_of(tensor)) is not None:
            memory.written()


def weight_stats() -> WeightStats:
    """Bytes and number of the copies held now, and how many refresh passes have run."""
    with _lock:
        _sweep()
        held = list(_copies.values())
        return WeightStats(sum(copy.tensor.nbytes for copy in held), len(held), _casts)


def writable_copies(param: Tensor) -> tuple[Tensor, ...]:
    """The copies of a parameter that may be overwritten now: no pending backward saved them.

    For an optimizer that writes them with the weight; it calls `wrote` afterwards, and raises their versions.
    """
    with _lock:
        copies = _copies_of(param)
        for copy in copies:
            copy.lent = copy.writable()
        return tuple(copy.tensor for copy in copies if copy.lent)


def wrote(params: Iterable[Tensor]) -> None:
    """What `writable_copies` gave for these parameters has just been rewritten from their new values."""
    moment()
    with _lock:
        for param in params:
            for copy in _copies_of(param):
                if copy.lent:
                    copy.settle(param)
                    copy.lent = False


def _copies_of(weight: Tensor) -> list[_Copy]:
    keys = [_key(weight, dtype) for dtype in (torch.bfloat16, torch.float16)]
    return [copy for key in keys if (copy := _copies.get(key)) is not None]


def _key(weight: Tensor, dtype: torch.dtype) -> tuple:
    place = (compat.storage_key(weight), weight.data_ptr())
    return (*place, weight.shape, weight.stride(), weight.dtype, dtype)


def _copy_of(weight: Tensor, dtype: torch.dtype) -> _Copy:
    key = _key(weight, dtype)
    if (copy := _copies.get(key)) is None:
        copy = _copies[key] = _Copy(weight, dtype)
        copy.memory.watch()
    return copy


def _cast(stale: Iterable[tuple[_Copy, Tensor]]) -> None:
    global _casts
    stale = list(stale)
    if not stale:
        return
    for copy, weight in stale:
        if not copy.writable():
            copy.allocate(weight, copy.tensor.dtype)
        copy.settle(weight)
    cast_many_([copy.tensor for copy, _ in stale], [weight for _, weight in stale])
    _casts += 1


def _tensors(found: torch.nn.Module | Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    if isinstance(found, torch.nn.Module):
        return [*found.parameters(), *found.buffers()]
    return [found] if isinstance(found, Tensor) else found


def _sweep() -> None:
    for binding in list(_bindings):
        binding.forget_freed()


def _collected(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2 and _lock.acquire(blocking=False):
        try:
            _sweep()
        finally:
            _lock.release()


gc.callbacks.append(_collected)
