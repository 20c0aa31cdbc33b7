"""Detect writes that don't raise the version counter of the weight they change.

torch's own writers of this kind report here: `.data` returns aliases with counters of their own, `numpy()` and DLPack
export memory without one, fused optimizers and a handful of methods write without raising it. While copies are alive,
torch is patched at the places in `patches.COPIES`; the patches are removed with the last copied weight. The hooks on
`optimizer.step()` are torch's own interface and stay.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from ampcompile.errors import ReleasedError
from ampcompile.torch_private import optimizers, patches, storages
from ampcompile.torch_private.dtensors import local_part
from ampcompile.torch_private.storages import address

from .remains import record_of, refusal
from .store import store

_ranges, _ticks = store.ranges, store.ticks  # the objects themselves: for the hot path, and as Dynamo traces them
_get_data = storages.read_data
_scripts: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()
"""Storages of the parameters of each optimizer when it last stepped."""


def _wrap_data(_: Any) -> property:
    return property(_hand_out_data, _assign_data, doc=storages.DATA_DOC)


def _hand_out_data(self: Tensor) -> Tensor:
    data = _get_data(self)
    try:
        if bisect_right(_ranges, at := address(data) or address(local_part(data))) & 1:
            store.hand_out(at)
    except (RuntimeError, TypeError):  # wrapped by a transform, without memory, or what a mode returned
        pass
    return data


def _assign_data(self: Tensor, value: Tensor) -> None:
    if store.released and (record := record_of(self)) is not None:
        raise ReleasedError(refusal(f"new data for {record.name}"))
    memory = store.find(self)
    if memory is None or not isinstance(value, Tensor) or storages.same_place(self, value):
        storages.write_data(self, value)
        return
    with store.lock:  # the tensor must not move while another thread casts from its memory
        memory.forget(self)
        storages.write_data(self, value)


def _wrap_numpy(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def numpy(self: Tensor, *, force: bool = False) -> Any:
        array = method(self, force=force) if force else method(self)
        try:
            if bisect_right(_ranges, at := address(self)) & 1 and type(holder := array.base) is Tensor:
                _export(holder, at)
        except (AttributeError, RuntimeError, TypeError):
            pass
        return array

    return numpy


def _wrap_dlpack(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def exporting(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        holder = self
        try:  # torch refuses tensors that require grad; `__torch_function__` handlers call this again
            if store.covers(at := address(self)) and not self.requires_grad and not has_torch_function_unary(self):
                holder = storages.alias(self)
                _export(holder, at)
        except (RuntimeError, TypeError):
            pass
        return export(holder, *args, **kwargs)

    return exporting


def _export(holder: Tensor, at: int) -> None:
    if (memory := store.find(holder)) is None:
        store.hand_out(at)
    else:
        memory.export(holder)


def _wrap_mover(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a method that gives a tensor other memory: its counter isn't that of the tensors there."""

    @functools.wraps(method)
    def moving(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (memory := store.find(self)) is not None:
            memory.forget(self)
        result = method(self, *args, **kwargs)
        if (memory := store.find(self)) is not None:
            memory.doubted()
        return result

    return moving


def _wrap_writer(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a method that writes a tensor without raising its version."""

    @functools.wraps(method)
    def writing(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return method(self, *args, **kwargs)
        finally:
            if (memory := store.find_in_ranges(self)) is not None:
                memory.written()

    return writing


def _wrap_storage_writer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a typed or untyped storage that writes it."""

    @functools.wraps(method)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            storage = getattr(self, "_untyped_storage", self)
            if (memory := store.memories.get(storage._cdata)) is not None:
                memory.doubted()
            elif store.covers(at := storage.data_ptr()):  # a slice of it, which has a key of its own
                store.handed_out.append(at)

    return writing


def _wrap_script_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call into TorchScript, whose uses of `.data` are in C++ and can't be patched."""

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (takes_data := _scripts.get(self)) is None:
            takes_data = _scripts[self] = "prim::data" in str(self.inlined_graph)
        try:
            return call(self, *args, **kwargs)
        finally:
            if takes_data:
                store.doubt_all()

    return calling


def _wrap_region_exit(leave: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the exit of a region in which in-place operations raise no version."""

    def leaving(self: Any, *args: Any) -> Any:
        store.doubt_all()
        return leave(self, *args)

    return leaving


def _wrap_swap(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Wrap the swap of two tensors' C++ objects, which fails while we hold weak references to them."""

    def swapping(first: Tensor, second: Tensor) -> None:
        for tensor in (first, second):
            if (memory := store.find(tensor)) is not None:
                memory.forget_sharers()
        store.forget_weights()
        swap(first, second)

    return swapping


_WRAPS: dict[str, patches.Wrap] = {
    "Tensor.data": _wrap_data,
    "Tensor.numpy": _wrap_numpy,
    "Tensor.__dlpack__": _wrap_dlpack,
    "dlpack.to_dlpack": _wrap_dlpack,
    "torch.to_dlpack": _wrap_dlpack,
    "Tensor.set_": _wrap_mover,
    "Tensor.apply_": _wrap_writer,
    "Tensor.map_": _wrap_writer,
    "Tensor.map2_": _wrap_writer,
    "UntypedStorage.__setitem__": _wrap_storage_writer,
    "UntypedStorage.byteswap": _wrap_storage_writer,
    "UntypedStorage.copy_": _wrap_storage_writer,
    "UntypedStorage.fill_": _wrap_storage_writer,
    "TypedStorage._setitem": _wrap_storage_writer,
    "ScriptFunction.__call__": _wrap_script_call,
    "ScriptMethod.__call__": _wrap_script_call,
    "_AutoDispatchBelowADInplaceOrView.__exit__": _wrap_region_exit,
    "_C._swap_tensor_impl": _wrap_swap,
}


def watch() -> None:
    """Install what isn't installed yet: optimizer hooks for good, patches until the last copied weight is freed."""
    _hook_optimizers()
    patches.install(patches.COPIES, _WRAPS, plan=store.on_last_freed.append)


@functools.cache
def _hook_optimizers() -> None:
    patches.add_optimizer_hooks(_step_begins, _step_ended)


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return _tick(optimizer)
    store.running.add(optimizer)
    if len(_stepped) > 1 or not all(memory.trainable for memory in store.watched()):
        _stepped[optimizer] = _storages(optimizer)  # others than before, it may be
    _written_by(optimizer)


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return _tick(optimizer)
    _written_by(optimizer)  # once more, for what another thread has cast meanwhile
    store.running.discard(optimizer)


def _written_by(optimizer: torch.optim.Optimizer) -> None:
    """Mark the memory of the parameters as written; and all other trainable weights, which sharded optimizers write.

    But if this optimizer surely writes nothing else, not what other such optimizers have stepped: in a GAN, each has
    weights of its own.
    """
    owned = _stepped.get(optimizer)
    if owned is None:
        owned = _stepped[optimizer] = _storages(optimizer)
    elsewhere: set[int] = set()
    if optimizers.writes_only_parameters(optimizer):
        for other in _stepped.keyrefs():
            if (known := other()) is not None and optimizers.writes_only_parameters(known):
                elsewhere |= _stepped[known]
    written = store.new_mark()
    for memory in store.watched():
        if memory.key in owned or (memory.trainable and memory.key not in elsewhere):
            memory.mark = written
    store.begin_epoch()


def _storages(optimizer: torch.optim.Optimizer) -> set[int]:
    """Keys of the storages of the parameters; for DTensors, those of this rank's parts."""
    params = [local_part(param) for group in optimizer.param_groups for param in group["params"]]
    try:
        return set(map(storages.storage_address, params))
    except RuntimeError:  # some are without memory
        return {storages.storage_address(param) for param in params if storages.has_memory(param)}


def _tick(optimizer: torch.optim.Optimizer) -> None:
    """Trace an operation into a compiled step that shows when it ran. Unfused optimizers raise versions anyway."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            _ticks.add_(1)
            return
