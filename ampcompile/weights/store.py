"""The one store of what is known about copies of weights: patches, hooks and finalizers report to it.

It finds the record of a tensor's memory, the copies made from it, and the sets of copies that graphs read.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.errors import WeightsError
from ampcompile.torch_private import dtensors, storages

if TYPE_CHECKING:
    from .binding import Binding
    from .copies import Copy
    from .copy_set import CopySet
    from .freshness import Memory
    from .gpu import Report
    from .lending import KnownLoan
    from .remains import Remains
    from .spec import Form


class CopyStore:
    """All state that copies of weights share in a process."""

    lock = threading.RLock()
    """Held while the records of weights and copies change."""

    def __init__(self) -> None:
        self.memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()  # by storage
        self.copies: weakref.WeakValueDictionary[tuple, Copy] = weakref.WeakValueDictionary()  # by place and form
        self.sets: weakref.WeakSet[CopySet] = weakref.WeakSet()
        self.loans: weakref.WeakSet[KnownLoan] = weakref.WeakSet()  # of steps that may take them again
        self.bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
        self.without_copies: weakref.WeakSet[Any] = weakref.WeakSet()  # compiled graphs that read weights as they are
        self.forms: list[Form] = []  # every form that a copy has been made in, in a fixed order
        self.captured: set[Copy] = set()  # copies that a captured CUDA graph writes: they keep their addresses
        self.reports: dict[torch.device, Report] = {}  # of unreported writes on GPUs
        self.new_mark = itertools.count(1).__next__  # a number that no mark had; C++ has negative ones of its own
        self.made = self.passes = 0  # copies made, and refresh passes that have cast something
        self.casting = False  # a pass has begun and not ended: the values of its copies are unknown
        self.buffers = object()  # another object before a buffer is freed, replaced or written
        self.epoch = object()  # another object after a write to a weight's memory is reported
        self.ranges: list[int] = []  # begins and ends of address ranges with copies, in order; freed memory too
        self.handed_out: list[int] = []  # addresses there of aliases with counters of their own, as `.data` returns
        self.ticks = torch.zeros(1, dtype=torch.int64)  # written by optimizer steps compiled with their hooks
        self.ticks_seen = self.ticks._version
        self.running: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in their step, or left by an error
        self.on_last_freed: list[Callable[[], None]] = []  # called once, when no memory with copies is left
        self.released: dict[int, Remains] = {}  # by id of the weight: what is left of weights without memory
        self.released_epoch = object()  # another object after a weight was released, restored or freed
        self.search_seconds, self.searched_at = 1.0, time.monotonic()  # left for searches of the heap, and since when

    def read_whole(self) -> set[int]:
        """Keys of the storages of weights that compiled graphs read themselves, not only as copies."""
        reads = [reader.whole_reads() for reader in (*self.bindings, *self.without_copies)]
        return {key for each in reads for key, reference in each.items() if not reference.expired()}

    def write_epoch(self) -> object:
        """A token, the same object until a write to a weight's memory is reported or an alias is handed out."""
        if self.ticks._version != self.ticks_seen:
            for memory in self.watched():
                if memory.trainable:
                    memory.written()
            self.ticks_seen = self.ticks._version
        if self.handed_out:
            self.doubt_handed_out()
        return self.epoch

    def begin_epoch(self) -> None:
        """Replace the epoch: every call has to examine its weights again."""
        self.epoch = object()

    def hand_out(self, address: int) -> None:
        """Record that an alias in copied memory was handed out, through which it may be written."""
        self.handed_out.append(address)
        if len(self.handed_out) > 1000:
            self.doubt_handed_out()

    def doubt_handed_out(self) -> None:
        """Doubt the memory that aliases were handed out for: it may have been written through them."""
        with self.lock:
            addresses = sorted(self.handed_out)
            for memory in self.watched():
                first = bisect_left(addresses, memory.begin)
                if first < len(addresses) and addresses[first] < memory.end:
                    memory.doubted()
            del self.handed_out[: len(addresses)]

    def doubt_all(self) -> None:
        """Record that any weight may have been written."""
        for memory in self.watched():
            memory.doubted()

    def watched(self) -> list[Memory]:
        """Records of all storages that have copies."""
        return [memory for ref in self.memories.valuerefs() if (memory := ref()) is not None]

    def find(self, tensor: Tensor) -> Memory | None:
        """Return the record of a tensor's storage, if copies were made from it."""
        try:
            with storages.NoTorchFunction():
                return self.memories.get(storages.storage_key(tensor))
        except RuntimeError:  # wrapped by a transform, or without memory: nothing there was copied
            return None

    def find_in_ranges(self, tensor: Tensor) -> Memory | None:
        """Do as `find`, faster for tensors outside the ranges; None too if a resize has moved the storage."""
        try:
            return self.find(tensor) if self.covers(storages.address(tensor)) else None
        except RuntimeError:
            return None

    def covers(self, address: int) -> int:
        """Return 1 if an address lies in a range, else 0."""
        return bisect_right(self.ranges, address) & 1

    def set_ranges(self, extents: Iterable[tuple[int, int]]) -> None:
        """Replace the ranges by these extents, merged where they meet."""
        merged: list[int] = []
        for begin, end in sorted(extents):
            if merged and begin <= merged[-1]:
                merged[-1] = max(merged[-1], end)
            elif begin < end:
                merged += (begin, end)
        self.ranges[:] = merged  # the same list: every `Tensor.data` of the process looks at it

    def begin_pass(self) -> None:
        """Begin to replace and write buffers: until `end_pass` no copy counts as fresh."""
        self.casting = True
        self.change_buffers()

    def end_pass(self) -> None:
        """End a pass: all its casts are recorded."""
        self.passes += 1
        self.casting = False

    def change_buffers(self) -> None:
        """Replace the token ahead of a change: a thread that found copies fresh and reads them later checks again."""
        self.buffers = object()

    def forget_weights(self) -> None:
        """Stop tracking weights, everywhere: also those of memory that one of them has left."""
        for copy_set in list(self.sets):
            copy_set.forget()
        for loan in list(self.loans):
            loan.forget()

    def forget_with_the_last(self) -> None:
        """Undo the patches and forget the ranges, if no memory is left and no other thread makes copies."""
        taken = False
        try:
            with _IfFree() as taken:
                if taken and not self.released and all(ref() is None for ref in self.memories.valuerefs()):
                    self.set_ranges(())
                    self.forget_weights()  # some may have moved to memory that nothing watches now
                    while self.on_last_freed:
                        self.on_last_freed.pop()()
        except RuntimeError:
            if taken:
                raise  # else another thread is making copies


class _IfFree:
    """Takes the lock if no other thread holds it. Both methods are C functions: no signal can leave the lock taken.

    `as` gives True if it is held; if not, leaving raises RuntimeError.
    """

    __enter__ = staticmethod(functools.partial(CopyStore.lock.acquire, blocking=False))
    __exit__ = staticmethod(CopyStore.lock.__exit__)


def whole_reads(weights: Iterable[Tensor]) -> dict[int, Any]:
    """References to the storages of these weights, by key: while one lives, no other storage gets its key."""
    found = (tensor.untyped_storage() for tensor in weights if storages.place(tensor) is not None)
    return {storage._cdata: storages.StorageWeakRef(storage) for storage in found}


store = CopyStore()


class WeightStats(NamedTuple):
    """`bytes` and number of the `copies` held now; `casts`: refresh passes so far.

    `bytes` counts packed forms too, but not the zeros that oneDNN pads their blocks with.
    """

    bytes: int
    copies: int
    casts: int


def weight_stats() -> WeightStats:
    """Return the bytes, number and refresh passes of the copies of all models: see `WeightStats`.

    >>> y = compiled(x)
    >>> ampcompile.weight_stats()
    WeightStats(bytes=520, copies=2, casts=...)
    """
    with store.lock:
        sizes = [size for copy in list(store.copies.values()) if (size := copy.nbytes())]
        return WeightStats(sum(sizes), len(sizes), store.passes)


def invalidate(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Make the next call cast these weights again: for writes that PyTorch can't detect (see docs/weights.md).

    A graph that reads one of them casts all tensors that it keeps copies of again, also buffers and tensors from
    attributes, closures and globals. Raises `WeightsError` if the argument is neither a module nor tensors.

    >>> import ctypes
    >>> written = ctypes.memset(model.weight.data_ptr(), 0, model.weight.nbytes)
    >>> ampcompile.invalidate(model)
    """
    with store.lock:
        for memory in _copied_with(model_or_params)[0]:
            memory.written()


def free_copies(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Free the low-precision copies of these weights now, packed forms included; the next call casts them again.

    For a model that is put aside for a while, or moved to another device. It covers the same weights as `invalidate`.
    A pending backward keeps the copies it saved until it has run. If you captured a step of `ampcompile.GradScaler` in
    a CUDA graph, the copies that the graph writes stay. Raises `WeightsError` as `invalidate` does.

    >>> ampcompile.free_copies(model)
    """
    with store.lock:
        memories, sets = _copied_with(model_or_params)
        for copy_set in sets:
            copy_set.free()
        for memory in memories:
            memory.written()
            for copy in list(memory.copies):
                copy.free(gone=False)


def _copied_with(model_or_params: Any) -> tuple[set[Memory], list[CopySet]]:
    """Return the copied memory of these tensors and of all tensors that a set reads with them, and those sets."""
    copied = {
        memory
        for tensor in map(dtensors.local_part, _tensors(model_or_params))
        if (memory := store.find_in_ranges(tensor)) is not None
    }
    sets = [copy_set for copy_set in list(store.sets) if not copied.isdisjoint(copy_set.memories)]
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
