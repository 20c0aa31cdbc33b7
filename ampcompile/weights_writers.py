"""Writes that leave no trace on the weight they change: by optimizers, and through `.data`.

Importing this module has every `optimizer.step()` and every `.data` of this process report to `weights_memory`.
Through a `.data` that was taken earlier a weight can be written unseen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import compat_weights as compat
from .weights_memory import Alias, memory_of, watched_memories


def _get_data(self: Tensor) -> Tensor:
    data = compat.read_data(self)
    if type(data) is Tensor:
        with compat.NoTorchFunction():
            _hand_out(data)
    return data


def _set_data(self: Tensor, value: Tensor) -> None:
    with compat.NoTorchFunction():
        before = compat.place(self)
    compat.write_data(self, value)
    with compat.NoTorchFunction():
        if compat.place(self) != before:
            _hand_in(self, value)


def _hand_out(tensor: Tensor) -> None:
    """Look at a new alias for as long as anything uses its counter."""
    if (counter := compat.counter_of(tensor)) is None:
        return
    memory = memory_of(tensor)
    alias = Alias(id(tensor), counter, memory)
    storage = memory.storage.cdata
    users = compat.storage_users(storage)

    def died(_: Any) -> None:
        if compat.storage_users(storage) > users:  # `detach` and `nn.Parameter` share a counter, not the tensor
            memory.adopt(alias, counter)
        alias.forget()

    alias.death = weakref.ref(tensor, died)


def _hand_in(tensor: Tensor, value: Tensor) -> None:
    """`tensor` now shares the memory of `value`, which may go on writing there."""
    if (counter := compat.counter_of(value)) is not None:
        memory = memory_of(tensor)
        memory.written()
        memory.adopt((id(value), memory.storage.cdata), counter)


@torch.compiler.disable  # compiled optimizers call it too
def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Optimizers write their parameters; sharded ones, others as well: every trainable weight is suspect."""
    watched = watched_memories()
    owned: set[int] = set()
    if not all(memory.trainable for memory in watched):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owned = {place[0] for place in map(compat.place, params) if place is not None}
    for memory in watched:
        if memory.trainable or memory.storage.cdata in owned:
            memory.written()


def _install() -> None:
    Tensor.data = property(_get_data, _set_data, doc=torch._C.TensorBase.data.__doc__)  # type: ignore[assignment]
    register_optimizer_step_post_hook(_stepped)


_install()
