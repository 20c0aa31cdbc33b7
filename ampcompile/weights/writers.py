"""Writes that leave no trace on the weight they change, and what makes them known.

torch's own writers that raise no version counter report here: `.data` hands out aliases with counters of their own,
fused optimizers write below the counters, and a handful of methods never heard of them. While copies are alive, torch
is patched at the places in `PATCHES`; with the last copy the patches go. The hooks on `optimizer.step()` are torch's
own and stay.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompile.torch_private import storages
from ampcompile.torch_private.storages import address

from .memory import (
    copied_memory_at,
    copied_memory_of,
    doubt_handed_out,
    everything_doubted,
    handed_out,
    known_memory,
    memories,
    on_last_freed,
    sets,
    ticks,
)
from .ranges import covered, ranges

_running: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_get_data = storages.read_data
_scripts: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


class Patch(NamedTuple):
    """An attribute of torch that is replaced while copies are alive: by what `wrap` makes of it."""

    owner: Any
    name: str
    wrap: Callable[[Any], Any]
    why: str


def _data(_: Any) -> property:
    return property(_hand_out_data, _give_data, doc=torch._C.TensorBase.data.__doc__)


def _hand_out_data(self: Tensor) -> Tensor:
    data = _get_data(self)
    try:
        if bisect_right(ranges, at := address(data)) & 1:
            handed_out.append(at)
            if len(handed_out) > 1000:
                doubt_handed_out()
    except (RuntimeError, TypeError):  # wrapped by a transform, without memory, or what a mode returned
        pass
    return data


def _give_data(self: Tensor, value: Tensor) -> None:
    memory = copied_memory_of(self)
    if memory is not None and isinstance(value, Tensor) and not storages.same_place(self, value):
        memory.forget(self)
    storages.write_data(self, value)


def _moves(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that gives a tensor other memory: its counter is not that of the tensors there."""

    @functools.wraps(method)
    def moving(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (memory := copied_memory_of(self)) is not None:
            memory.forget(self)
        result = method(self, *args, **kwargs)
        if (memory := copied_memory_of(self)) is not None:
            memory.doubted()
        return result

    return moving


def _writes(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that writes a tensor without raising its version."""

    @functools.wraps(method)
    def writing(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return method(self, *args, **kwargs)
        finally:
            if (memory := copied_memory_at(self)) is not None:
                memory.written()

    return writing


def _writes_storage(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a storage, typed or not, that writes it."""

    @functools.wraps(method)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            storage = getattr(self, "_untyped_storage", self)
            if (memory := known_memory(storage._cdata)) is not None:
                memory.doubted()
            elif covered(at := storage.data_ptr()):  # a slice is a storage of its own
                handed_out.append(at)

    return writing


def _scripted(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call into TorchScript, whose `.data` is C++ and can't be seen."""

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (takes_data := _scripts.get(self)) is None:
            takes_data = _scripts[self] = "prim::data" in str(self.inlined_graph)
        try:
            return call(self, *args, **kwargs)
        finally:
            if takes_data:
                everything_doubted()

    return calling


def _ends(leave: Callable[..., Any]) -> Callable[..., Any]:
    """The end of a region in which in-place operations raise no version."""

    def leaving(self: Any, *args: Any) -> Any:
        everything_doubted()
        return leave(self, *args)

    return leaving


def _swaps(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """The exchange of two tensors' insides, which has to find no weak reference of ours."""

    def swapping(first: Tensor, second: Tensor) -> None:
        for tensor in (first, second):
            if (memory := copied_memory_of(tensor)) is not None:
                memory.forget_sharers()
                for each in list(sets):
                    if memory in each.memories:
                        each.forget()
        swap(first, second)

    return swapping


_NO_VERSION = "writes without raising the version counter"
PATCHES = (
    Patch(Tensor, "data", _data, "gives out an alias with a version counter of its own"),
    Patch(Tensor, "set_", _moves, "shares another tensor's memory, not its version counter"),
    *(Patch(Tensor, name, _writes, _NO_VERSION) for name in ("apply_", "map_", "map2_")),
    *(Patch(torch.UntypedStorage, name, _writes_storage, _NO_VERSION) for name in ("__setitem__", "copy_", "fill_")),
    Patch(torch.TypedStorage, "_setitem", _writes_storage, _NO_VERSION),
    Patch(storages.ScriptFunction, "__call__", _scripted, "takes `.data` in C++"),
    Patch(storages.ScriptMethod, "__call__", _scripted, "takes `.data` in C++"),
    Patch(storages.BelowADInplaceOrView, "__exit__", _ends, "operations inside raise no version counter"),
    Patch(*storages.swap_tensor_impl, _swaps, "refuses tensors with weak references, as we have them"),
)
_MISSING = object()
_replaced: list[tuple[Patch, Any]] = []
_watching = False


def watch() -> None:
    """Install what isn't yet: hooks on optimizers for good, patches until the last copied weight is freed."""
    global _watching
    if _watching:
        return
    _hook_optimizers()
    _unpatch()  # what an interrupt left
    for patch in PATCHES:
        _replaced.append((patch, vars(patch.owner).get(patch.name, _MISSING)))
        replacement = patch.wrap(getattr(patch.owner, patch.name))
        if not isinstance(replacement, property):  # so that it pickles as what it stands for
            owner = getattr(patch.owner, "__qualname__", "")
            replacement.__qualname__ = f"{owner}.{patch.name}".strip(".")
            replacement.__module__ = patch.owner.__module__ if owner else patch.owner.__name__
        setattr(patch.owner, patch.name, replacement)
    on_last_freed.append(_unpatch)
    _watching = True


def _unpatch() -> None:
    global _watching
    _watching = False
    while _replaced:
        patch, original = _replaced[-1]
        if original is not _MISSING:
            setattr(patch.owner, patch.name, original)
        elif patch.name in vars(patch.owner):
            delattr(patch.owner, patch.name)
        _replaced.pop()


@functools.cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_ended)


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Optimizers write their parameters; sharded ones, others as well: every trainable weight is suspect."""
    if torch.compiler.is_compiling():
        return _tick(optimizer)
    _running.add(optimizer)
    _written_by(optimizer)


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return _tick(optimizer)
    _written_by(optimizer)  # once more, for what another thread has cast meanwhile
    _running.discard(optimizer)


def _written_by(optimizer: torch.optim.Optimizer) -> None:
    copied = memories()
    owned: set[int] = set()
    if not all(memory.trainable for memory in copied):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owned = {memory.key for memory in map(copied_memory_at, params) if memory is not None}
    for memory in copied:
        if memory.trainable or memory.key in owned:
            memory.written()


def _tick(optimizer: torch.optim.Optimizer) -> None:
    """In a compiled step, an operation that shows when it ran. Optimizers that aren't fused raise versions anyway."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            ticks.add_(1)
            return


def step_is_running() -> bool:
    """Whether an optimizer is in its step, or left it by an error: weights may have been written since."""
    return bool(_running)
