"""Private parts of torch that the scaler uses."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.optim import optimizer

from . import storages

Hook = Callable[..., Any]
_hold: Any = torch.UntypedStorage._weak_ref
_free: Any = torch.UntypedStorage._free_weak_ref


def step_hooks(instance: Any) -> list[Hook]:
    """Hooks before and after this optimizer's `step`, global ones too; torch has no public list of them."""
    everywhere = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    hooks = (instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks, *everywhere)
    return [hook for table in hooks for hook in table.values()]


def pre_hooks(instance: Any) -> list[Hook]:
    """Hooks registered ahead of this optimizer's `step`; none if it is no optimizer of torch's."""
    return list(getattr(instance, "_optimizer_step_pre_hooks", {}).values())


def writes_only_parameters(instance: Any) -> bool:
    """True for an optimizer of torch's own without hooks: its step surely writes nothing but its parameters."""
    hooked = instance._optimizer_step_pre_hooks or instance._optimizer_step_post_hooks
    return not hooked and type(instance).__module__.startswith("torch.optim.")


def replace_step(instance: Any, step: Hook, reduce: Hook) -> dict[str, Any]:
    """Set a step on an optimizer, not on its class, that unscales and skips as torch's fused ones do; and `reduce`,
    with which it is copied and pickled. Returns what `restore_step` sets again.
    """
    own = {"step": step, "__reduce_ex__": reduce, "_step_supports_amp_scaling": True}
    before = {name: vars(instance)[name] for name in own if name in vars(instance)}
    vars(instance).update(own)
    return before


def restore_step(instance: Any, before: dict[str, Any]) -> None:
    """Remove what `replace_step` has set."""
    for name in ("step", "__reduce_ex__", "_step_supports_amp_scaling"):
        del vars(instance)[name]
    vars(instance).update(before)


def fresh_optimizer_states() -> dict[int, dict[str, Any]]:
    """`GradScaler._per_optimizer_states` as it is at the start of an iteration; pickles."""
    return defaultdict(grad_scaler._refresh_per_optimizer_state)


class Marks:
    """Identities and versions of tensors, to recognize them later without holding them; not of sparse ones.

    `addresses`: those of the tensors, if the caller has just read them all.
    """

    _ids: Sequence[int] = ()
    """Keys of the storages: no other storage gets them while these are held weakly."""

    def __init__(self, tensors: Sequence[Tensor], addresses: list[int] | None = None) -> None:
        strided, untyped_storages = _of_strided(Tensor.untyped_storage, tensors)
        self._ids = list(map(_hold, untyped_storages))
        self._marks = _marks(self._ids, strided, addresses)

    def match(self, tensors: Sequence[Tensor], addresses: list[int] | None = None) -> bool:
        """Return True if these are among the marked tensors, and none was written or given other memory."""
        strided, ids = _of_strided(storages.storage_address, tensors)
        marks = _marks(ids, strided, addresses)
        return marks == self._marks or set(zip(*self._marks, strict=True)).issuperset(zip(*marks, strict=True))

    def version_reader(self, tensors: Sequence[Tensor]) -> Callable[[], object]:
        """Return a C function that reads the versions of `tensors`, all that were marked, anew when it is called."""
        strided, _ = _of_strided(storages.storage_address, tensors)
        return partial(self._marks[2].__setitem__, slice(None), map(storages.version, strided))

    def __del__(self) -> None:
        deque(map(_free, self._ids), maxlen=0)


def _of_strided(read: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Any]]:
    """The tensors that have a storage, and what `read` gives for each."""
    try:
        return tensors, list(map(read, tensors))
    except RuntimeError:
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        return strided, list(map(read, strided))


def _marks(
    ids: list[int], tensors: Sequence[Tensor], addresses: list[int] | None
) -> tuple[list[int], list[int], list[int]]:
    addresses = list(map(Tensor.data_ptr, tensors)) if addresses is None else addresses
    return ids, addresses, list(map(storages.version, tensors))
