"""What the scaler uses of torch's private parts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.optim import optimizer

Hook = Callable[..., Any]
_address, _version = attrgetter("_cdata"), attrgetter("_version")
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


Mark = tuple[int, int, int]


def marks(tensors: Sequence[Tensor]) -> list[Mark | None]:
    """What changes when a tensor is written or replaced: storage, address and version; None for one without."""
    try:
        storages = list(map(Tensor.untyped_storage, tensors))
    except RuntimeError:  # a sparse one
        return [None if tensor.layout is not torch.strided else marks([tensor])[0] for tensor in tensors]
    return list(zip(map(_address, storages), map(Tensor.data_ptr, tensors), map(_version, tensors), strict=True))


class WeakStorages:
    """The storages of strided tensors, whose ids aren't given to others while this is held."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self.held = list(map(_hold, map(Tensor.untyped_storage, strided)))

    def __del__(self) -> None:
        for each in self.held:
            _free(each)
