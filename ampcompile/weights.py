"""Low-precision copies of weights that compiled graphs read: cast once per update, shared, never out of date."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat_weights as compat
from . import weights_gpu as gpu
from . import weights_writers as weights_writers  # its import sets the signals up
from .packing import packed_bytes
from .weights_copy import Weight, copies, copies_of, copy_of, lock, passes, refresh
from .weights_memory import known_memory_of, moment
from .weights_set import CopySet

_MAX_SETS = 4  # sets of weights that one graph keeps copies of, when it is called with several in turn
_CLASSES = (Tensor, torch.nn.Parameter, compat.FakeTensor)

_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()


class WeightStats(NamedTuple):
    """`bytes` (packed forms included) and number of the `copies` held now; `casts`: refresh passes so far."""

    bytes: int
    copies: int
    casts: int


class Binding:
    """The copies that one compiled graph reads: slot i holds weight i of each call in `dtypes[i]`. Thread-safe.

    A slot's weight keeps its shape and strides from call to call, as Dynamo's guards see to. Which tensor it is,
    and where its memory lies, may change.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], in_place: bool) -> None:
        self._dtypes, self._in_place = tuple(dtypes), in_place
        self._recent: tuple[CopySet, ...] = ()
        _bindings.add(self)

    def copies(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The copies of this call's weights, up to date. Casts those that were not, all in one pass.

        The list is the binding's own, to be read only; it is the same list for as long as nothing in it changed.
        """
        for known in self._recent:
            if known.fresh(weights):
                if known.rechecks:
                    known.look(weights)
                return known.tensors
        return self._refresh(weights)

    def _refresh(self, weights: Sequence[Tensor]) -> list[Tensor]:
        with lock, torch.inference_mode(False), torch.no_grad():
            _forget_freed()
            now = moment()
            held = list(map(Weight.of, weights))
            members = [copy_of(weight.tensor, dtype) for weight, dtype in zip(held, self._dtypes, strict=True)]
            for copy, weight in zip(members, weights, strict=True):
                copy.in_place |= self._in_place
                copy.memory.trainable |= weight.requires_grad
            captured = gpu.capturing(weights)
            refresh(zip(members, held, strict=True), every=captured)
            if captured:  # nothing has run: the copies hold their old values until the graph is replayed
                for copy in members:
                    copy.forget()
            ids = [weight.key for weight in held]
            before = next((other for other in self._recent if other.ids == ids), None)
            known = CopySet(held, members, None if captured else now, before)
            if not captured:
                known.look(weights)
            others = [other for other in self._recent if other is not before]
            self._recent = (known, *others[: _MAX_SETS - 1])
            return known.tensors

    def forget_freed(self) -> None:
        """Let go of the copies of weights that are no more."""
        if any(known.gone() for known in self._recent):
            self._recent = tuple(known for known in self._recent if not known.gone())


def bind(weights: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], in_place: bool = False) -> Binding:
    """A binding for one compiled graph. Copies are made at its first call: `weights` may be fake or unknown here.

    `in_place`: copies keep their addresses whatever happens, for replayed CUDA graphs; a backward that is still to
    come and saved one then raises autograd's error.
    """
    assert len(weights) == len(dtypes)
    return Binding(dtypes, in_place)


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
        and compat.is_dense(tensor)
        and not tensor.is_inference()
        and not compat.is_managed_by_fsdp(tensor)
    )


def invalidate(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Have the next call cast these weights again: for writes that PyTorch can't know of (see docs/weights.md)."""
    with lock:
        for tensor in _tensors(model_or_params):
            if compat.place(tensor) is not None and (memory := known_memory_of(tensor)) is not None:
                memory.written()


def weight_stats() -> WeightStats:
    """What the copies cost now: see `WeightStats`."""
    with lock:
        _forget_freed()
        held = list(copies.values())
        return WeightStats(sum(copy.tensor.nbytes for copy in held) + packed_bytes(), len(held), passes())


def writable_copies(param: Tensor) -> tuple[Tensor, ...]:
    """The copies of a parameter that may be overwritten now: no backward that is still to come saved them.

    For an optimizer that writes them together with the weight. It raises their versions, then calls `wrote`.
    """
    with lock:
        found = copies_of(param)
        for copy in found:
            copy.lent = copy.writable()
        return tuple(copy.tensor for copy in found if copy.lent)


def wrote(params: Iterable[Tensor]) -> None:
    """All that `writable_copies` gave for these parameters was just rewritten from the parameters' new values."""
    with lock, torch.inference_mode(False):
        moment()
        written: list[Tensor] = []
        for param in params:
            for copy in copies_of(param):
                if copy.lent:
                    copy.settle(Weight.of(param))
                    copy.lent = False
                    written.append(copy.tensor)
        gpu.cast_done(written)


def _tensors(found: torch.nn.Module | Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    if isinstance(found, torch.nn.Module):
        return [*found.parameters(), *found.buffers()]
    return [found] if isinstance(found, Tensor) else found


def _forget_freed() -> None:
    for binding in list(_bindings):
        binding.forget_freed()


def _collected(phase: str, info: dict[str, int]) -> None:
    """After a full collection: freed weights take their copies along."""
    if phase == "stop" and info["generation"] == 2 and lock.acquire(blocking=False):
        try:
            _forget_freed()
        finally:
            lock.release()


gc.callbacks.append(_collected)
atexit.register(gc.callbacks.remove, _collected)
