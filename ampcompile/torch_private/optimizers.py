"""What the scaler uses of torch's private parts."""

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


def step_hooks(each: Any) -> list[Hook]:
    """Hooks before and after this optimizer's `step`, those of all optimizers too; torch lists them nowhere."""
    everywhere = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    hooks = (each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks, *everywhere)
    return [hook for table in hooks for hook in table.values()]


def pre_hooks(each: Any) -> list[Hook]:
    """Hooks registered ahead of this optimizer's `step`; none if it is no optimizer of torch's."""
    return list(getattr(each, "_optimizer_step_pre_hooks", {}).values())


def fresh_optimizer_states() -> dict[int, dict[str, Any]]:
    """`GradScaler._per_optimizer_states` as it is at the start of an iteration; pickles."""
    return defaultdict(grad_scaler._refresh_per_optimizer_state)


class Marks:
    """What some tensors are now, recognized later without being held. Those without a storage, sparse ones, are not.

    `addresses`: theirs, where the caller has just read them all.
    """

    _ids: Sequence[int] = ()
    """The storages': nobody else gets them while they are held weakly."""

    def __init__(self, tensors: Sequence[Tensor], addresses: list[int] | None = None) -> None:
        strided, held = _of_strided(Tensor.untyped_storage, tensors)
        self._ids = list(map(_hold, held))
        self._marks = _marks(self._ids, strided, addresses)

    def match(self, tensors: Sequence[Tensor], addresses: list[int] | None = None) -> bool:
        """Whether these are among them, and none was written or given other memory."""
        strided, ids = _of_strided(storages.storage_address, tensors)
        found = _marks(ids, strided, addresses)
        return found == self._marks or set(zip(*self._marks, strict=True)).issuperset(zip(*found, strict=True))

    def version_reader(self, tensors: Sequence[Tensor]) -> Callable[[], object]:
        """A function of C that takes these tensors' versions, of all that were marked, once more when it is called."""
        strided, _ = _of_strided(storages.storage_address, tensors)
        return partial(self._marks[2].__setitem__, slice(None), map(storages.version, strided))

    def __del__(self) -> None:
        deque(map(_free, self._ids), maxlen=0)


def _of_strided(read: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Any]]:
    """The tensors that have a storage, and what `read` gives for each."""
    try:
        return tensors, list(map(read, tensors))
    except RuntimeError:
        found = [tensor for tensor in tensors if tensor.layout is torch.strided]
        return found, list(map(read, found))


def _marks(
    ids: list[int], tensors: Sequence[Tensor], addresses: list[int] | None
) -> tuple[list[int], list[int], list[int]]:
    addresses = list(map(Tensor.data_ptr, tensors)) if addresses is None else addresses
    return ids, addresses, list(map(storages.version, tensors))
