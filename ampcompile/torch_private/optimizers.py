"""What the scaler uses of torch's private parts."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer

Hook = Callable[..., Any]


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


def mark(tensor: Tensor) -> tuple[int, int, int] | None:
    """What changes when a tensor is written or replaced: storage, address and version; None if it has none."""
    try:
        return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor._version
    except RuntimeError:
        return None


def weak_storages(tensors: Iterable[Tensor]) -> list[StorageWeakRef]:
    """The storages of strided tensors, whose ids aren't given to others while this is held."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.layout is torch.strided]
