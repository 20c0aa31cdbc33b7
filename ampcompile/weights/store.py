"""The one store of the copies of all weights, and what users ask of it."""

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.errors import OptionError
from ampcompile.torch_private import marks, storages
from ampcompile.torch_private.storages import Living

from . import table


class CopyStore:
    """All state that copies of weights share in a process, beside the table.

    The files that import this one define what it holds: `copies` a `Copy`, `binding` a `CopySet` and a `Binding`,
    `captures` the copies of a captured step.
    """

    lock = threading.RLock()  # held while copies are made or cast; a weight that dies frees its copies without it

    @functools.cached_property
    def table(self) -> Any:
        """The table in C++; never asked for where there is none."""
        return table.load()

    def __init__(self) -> None:
        self.keys = table.KEYS
        self.copies: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
        self.by_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.sets: Living[Any] = Living()
        self.bindings: Living[Any] = Living()
        self.without_copies: Living[Any] = Living()  # compiled graphs that read weights as they are
        self.capture: Any = None  # `CapturedCopies` of the step that is being captured, or soon will be
        self.captured: set[Any] = set()  # copies that a captured CUDA graph reads or writes: they keep their addresses

    def report(self, keys: Iterable[int], what: int) -> None:
        """Report to the table that storages with these keys were written, or may have been."""
        known = table.array([key for key in keys if key in self.keys])
        if len(known):
            self.table.report(len(known), known.ctypes.data, what)

    def note_updated(self, keys: Iterable[int]) -> None:
        """Tell the table that a step updates these storages, which lets go of what no graph reads any more."""
        known = table.array([key for key in keys if key in self.keys])
        if len(known):
            self.table.note_updated(len(known), known.ctypes.data)

    def read_whole(self) -> set[int]:
        """Keys of the storages of weights that compiled graphs read themselves, not only as copies."""
        reads = [reader.whole_reads() for reader in (*self.bindings, *self.without_copies)]
        return {key for references in reads for key, reference in references.items() if not reference.expired()}


def whole_reads(weights: Iterable[Tensor]) -> dict[int, Any]:
    """References to the storages of these weights, by key: while one lives, no other storage gets its key."""
    held = []
    for weight in weights:
        try:
            held.append(storages.untyped_storage(weight))
        except (RuntimeError, NotImplementedError):  # without memory of its own: sparse, fake, wrapped by a transform
            continue
    return {storage._cdata: storages.StorageWeakRef(storage) for storage in held}


store = CopyStore()


class WeightStats(NamedTuple):
    """`bytes` and number of the `copies` held now; `casts`: refresh passes so far.

    `bytes` counts packed forms too, but not the zeros that oneDNN pads their blocks with.
    """

    bytes: int
    copies: int
    casts: int


@marks.run_untraced
def weight_stats() -> WeightStats:
    """Return the bytes, number and refresh passes of the copies of all models: see `WeightStats`.

    >>> y = compiled(x)
    >>> ampcompile.weight_stats()
    WeightStats(bytes=520, copies=2, casts=...)
    """
    if (loaded := table.load()) is None:
        return WeightStats(0, 0, 0)
    with store.lock:
        sizes = [(key[:-1], size) for key, copy in list(store.copies.items()) if (size := copy.nbytes())]
        return WeightStats(sum(size for _, size in sizes), len({key for key, _ in sizes}), loaded.count_passes())


@marks.run_untraced
def invalidate(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Make the next call cast these weights again: for writes that PyTorch can't detect (see docs/weights.md).

    A graph that reads one of them casts all tensors that it keeps copies of again, also buffers and tensors from
    attributes, closures and globals. Raises `OptionError` if the argument is neither a module nor tensors.

    >>> import ctypes
    >>> written = ctypes.memset(model.weight.data_ptr(), 0, model.weight.nbytes)
    >>> ampcompile.invalidate(model)
    """
    with store.lock:
        mark_unproven(_copied_with(model_or_params)[0])


def mark_unproven(keys: Iterable[int]) -> None:
    """Let no copy of these storages count as fresh, without a look at them; for all: `store.keys`."""
    store.report(keys, table.WRITTEN)


@marks.run_untraced
def free_copies(model_or_params: torch.nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Free the low-precision copies of these weights now, packed forms included; the next call casts them again.

    For a model that is put aside for a while, or moved to another device. It covers the same weights as `invalidate`.
    A pending backward keeps the copies it saved until it has run. If you captured a step of `ampcompile.GradScaler` in
    a CUDA graph, the copies that the graph reads or writes stay. Raises `OptionError` as `invalidate` does.

    >>> ampcompile.free_copies(model)
    """
    with store.lock:
        keys, copies = _copied_with(model_or_params)
        mark_unproven(keys)
        for copy in copies:
            copy.free(gone=False)


def _copied_with(model_or_params: Any) -> tuple[set[int], list[Any]]:
    """Return the storages of these tensors and of every set that reads one of them; and the copies of all of them."""
    keys = {
        key
        for tensor in map(storages.local_part, _tensors(model_or_params))
        if (key := key_of(tensor)) is not None and key in store.keys
    }
    keys = keys.union(*(copy_set.keys for copy_set in list(store.sets) if not keys.isdisjoint(copy_set.keys)))
    return keys, [copy for copy in list(store.copies.values()) if copy.key in keys]


def key_of(tensor: Tensor) -> int | None:
    """The key of a tensor's storage, without a Python object of it; None for a tensor without memory."""
    try:
        with storages.NoTorchFunction():
            return storages.storage_address(tensor)
    except (RuntimeError, TypeError):
        return None


def _tensors(source: Any) -> list[Tensor]:
    if isinstance(source, torch.nn.Module):
        attributes = [value for module in source.modules() for value in vars(module).values()]
        return [*source.parameters(), *source.buffers(), *(value for value in attributes if isinstance(value, Tensor))]
    tensors = [source] if isinstance(source, Tensor) else list(source) if isinstance(source, Iterable) else [source]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise OptionError(
                f"found {type(tensor).__name__!r}, expected a torch.nn.Module, a tensor, or several tensors: pass the "
                "model, or model.parameters()"
            )
    return tensors
