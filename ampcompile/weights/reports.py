"""Reports to the table of what raises no version counter: optimizers, and whatever hands memory out.

The hooks on `optimizer.step()` are torch's own interface; the patches are at the places in `patches.COPIES`.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

from ampcompile.torch_private import dispatcher, marks, optimizers, patches, storages
from ampcompile.torch_private.storages import local_part

from . import table
from .store import CopyStore, key_of, store
from .table import PERHAPS_WRITTEN, STEPS, WRITTEN, WRITTEN_IF_TRAINABLE

_keys = store.keys  # the object itself: every `Tensor.data` of the process looks there
_key_of = storages.storage_address
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int] | None] = weakref.WeakKeyDictionary()
"""By optimizer, the storages that its parameters had when it last stepped; None: those that they have now."""


_read_again: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weights from which a graph computes again in backward: a step that raises no versions raises theirs all the same."""


@dataclass(eq=False)
class _Step:
    """A step that has begun, in a thread; `code`: that of the function which stays on the stack until it ends."""

    thread: int
    optimizer: weakref.ref[torch.optim.Optimizer]
    code: CodeType


def _hand_out_data(self: Tensor) -> Tensor:
    data = storages.read_data(self)
    try:
        if (key := _key_of(data)) in _keys or (
            data is not (part := local_part(data)) and (key := _key_of(part)) in _keys
        ):
            store.report([key], PERHAPS_WRITTEN)
    except (RuntimeError, TypeError):  # wrapped by a transform, without memory, or what a mode returned
        pass
    return data


def _assign_data(self: Tensor, value: Tensor) -> None:
    if _keys and isinstance(value, Tensor) and (key_of(self) in _keys or key_of(value) in _keys):
        store.table.note_move(self)
    storages.write_data(self, value)


def _wrap_export(export: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what gives out memory: it is given a tensor with a counter of its own, so that its holders don't match."""

    @functools.wraps(export)
    def exporting(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        holder = self
        try:  # torch refuses tensors that require grad, and `__torch_function__` handlers call this again
            refused = self.requires_grad and not kwargs.get("force")
            if (key := _key_of(self)) in _keys and not refused and not has_torch_function_unary(self):
                with dispatcher.without_modes():
                    holder = storages.read_data(self)
                store.report([key], PERHAPS_WRITTEN)
        except (RuntimeError, TypeError):
            pass
        return export(holder, *args, **kwargs)

    marks.pass_over(exporting)
    return exporting


def _wrap_sharing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method after which others may write the tensor's storage without raising the weights' counters."""

    @functools.wraps(method)
    def sharing(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _keys:  # `set_`
            store.table.note_move(self)
        result = method(self, *args, **kwargs)
        if (key := key_of(self)) in _keys and key is not None:
            store.report([key], PERHAPS_WRITTEN)
        return result

    marks.pass_over(sharing)
    return sharing


def _wrap_dispatch(after_local_op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what follows each operation on DTensors, which writes their parts without raising a version."""

    @functools.wraps(after_local_op)
    def dispatched(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        if op._schema.is_mutable:
            given = [*args, *kwargs.values()]
            lists = (value if isinstance(value, (list, tuple)) else (value,) for value in given)
            parts = [local_part(value) for values in lists for value in values if isinstance(value, Tensor)]
            store.report([key for part in parts if (key := key_of(part)) is not None], WRITTEN)
        return after_local_op(self, op, args, kwargs, *rest)

    return dispatched


_WRAPS: dict[str, patches.Wrap] = {
    "Tensor.data": lambda _: property(_hand_out_data, _assign_data, doc=storages.DATA_DOC),
    "Tensor.numpy": _wrap_export,
    "Tensor.__dlpack__": _wrap_export,
    "dlpack.to_dlpack": _wrap_export,
    "torch.to_dlpack": _wrap_export,
    "Tensor.set_": _wrap_sharing,
    "Tensor.untyped_storage": _wrap_sharing,
}


def watch_writers() -> None:
    """Install the hooks and patches, at the first copy of a weight."""
    _hook_optimizers()
    for function in (_hand_out_data, key_of, CopyStore.report):  # else Dynamo, tracing around them, traces them too
        marks.pass_over(function)
    patches.install(patches.COPIES, _WRAPS)


def watch_shards() -> None:
    """Install the patch for DTensors."""
    patches.install(patches.SHARDS, {"OpDispatcher._dispatch_fast_path_python_tail": _wrap_dispatch})


@functools.cache
def _hook_optimizers() -> None:
    patches.add_optimizer_hooks(_step_begins, _step_ended)


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return _tick(optimizer)
    _begin(optimizer, sys._getframe(1).f_code)


def _begin(optimizer: torch.optim.Optimizer, code: CodeType) -> None:
    _stepped[optimizer] = _storages(optimizer)
    STEPS.add(_Step(threading.get_ident(), weakref.ref(optimizer), code))
    _written_by(optimizer)
    store.note_updated(_stepped[optimizer] or ())


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return _tick(optimizer)
    _written_by(optimizer)  # once more, for what another thread has cast meanwhile
    if _read_again:
        params = (param for group in optimizer.param_groups if group.get("fused") for param in group["params"])
        increment_version([param for param in params if param in _read_again and param.grad is not None])
    thread = threading.get_ident()
    STEPS.difference_update([step for step in list(STEPS) if step.thread == thread and step.optimizer() is optimizer])


def refuse_late_reads(weights: Iterable[Tensor]) -> None:
    """Raise the versions of these weights in steps that raise none: a backward that reads them later then fails."""
    _hook_optimizers()
    _read_again.update(dict.fromkeys(weights))


def in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is in a step that is reported, or was left by an error in one."""
    return any(step.optimizer() is optimizer for step in list(STEPS))


def note_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Note an optimizer whose steps run no hooks: they raise the versions of all that they write, and write copies."""
    _stepped[optimizer] = None


@contextlib.contextmanager
def untold_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Report a step that tells nothing, and is taken in the context without its hooks."""
    if not _hook_optimizers.cache_info().currsize:
        yield
        return
    _begin(optimizer, sys._getframe(2).f_code)  # of the `with` statement: this one is not on the stack
    yield
    _step_ended(optimizer)


def drop_failed_steps() -> None:
    """Forget steps that ended with an error, for which torch calls no hook: their function is on no stack any more.

    What they were writing is reported once more, for what another thread has cast meanwhile.
    """
    for step in list(STEPS):  # before the look at threads: a step that begins later is none of these
        frame = sys._current_frames().get(step.thread)
        while frame is not None and frame.f_code is not step.code:
            frame = frame.f_back
        if frame is None:
            optimizer = step.optimizer()
            store.report(list(_keys), WRITTEN) if optimizer is None else _written_by(optimizer)
            STEPS.discard(step)


def _written_by(optimizer: torch.optim.Optimizer) -> None:
    """Report the parameters' memory as written, and all other trainable weights too, as sharded optimizers write those.

    But if this optimizer surely writes only its parameters, leave out those of other optimizers of which that is true:
    in a GAN, each has weights of its own.
    """
    owned = _stepped.get(optimizer) or set()
    elsewhere: set[int] = set()
    if optimizers.writes_only_parameters(optimizer):
        for other in _stepped.keyrefs():
            if (known := other()) is not None and optimizers.writes_only_parameters(known):
                elsewhere |= _storages(known) if (stepped := _stepped[known]) is None else stepped
    store.report(owned, WRITTEN)
    store.report(set(_keys) - owned - elsewhere, WRITTEN_IF_TRAINABLE)


def _storages(optimizer: torch.optim.Optimizer) -> set[int]:
    """Keys of the storages of the parameters; for DTensors, those of this rank's parts."""
    params: Iterable[Any] = (param for group in optimizer.param_groups for param in group["params"])
    return {key for param in params if (key := key_of(local_part(param))) is not None}


def _tick(optimizer: torch.optim.Optimizer) -> None:
    """Trace an operation into a compiled step that shows when it ran. Unfused optimizers raise versions anyway."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            table.TICKS.add_(1)
            return
