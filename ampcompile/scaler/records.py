"""The scaler's records of optimizers, each for as long as its optimizer lives."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError

from .pending import call_unbroken, drop, parameters, pending
from .plan import Plans, any_set


@dataclass
class Record:
    """The scaler's state for one optimizer."""

    optimizer: Callable[[], Any]
    plans: Plans = field(default_factory=lambda: Plans("takes the generic path"))
    found_infs: tuple[Tensor, ...] | None = None
    """Overflow flags of the latest step; None before the first."""

    def skipped(self) -> Tensor:
        """Return whether the latest step was skipped: 0-dim bool on the device."""
        if self.found_infs is None:
            raise ScalerError("found no step so far, expected one: ask after scaler.step(optimizer)")
        found_inf = any_set(self.found_infs)
        if found_inf is not None:
            return found_inf.reshape(()).ne(0)
        optimizer = self.optimizer()
        return torch.zeros((), dtype=torch.bool, device=None if optimizer is None else parameters(optimizer)[0].device)


class Records:
    """A record per optimizer, by identity: optimizers needn't be hashable."""

    def __init__(self) -> None:
        self._by_id: dict[int, Record] = {}

    def __getitem__(self, optimizer: Any) -> Record:
        key, by_id = id(optimizer), self._by_id
        if key not in by_id or by_id[key].optimizer() is not optimizer:
            try:
                reference: Callable[[], Any] = weakref.ref(optimizer, lambda _: by_id.pop(key, None))
            except TypeError:  # a duck-typed optimizer with slots
                reference = lambda: optimizer  # noqa: E731
            by_id[key] = Record(reference)
        return by_id[key]

    def end_iteration(self, begin: Callable[[], object] | None = None) -> None:
        """Drop pending factors of steps that weren't taken, or, if the scaler doesn't scale, mark them as over.

        `begin`: for a scaler that scales, a C function that begins its next iteration, uninterrupted with the drop.
        """
        optimizers = [record.optimizer() for record in self._by_id.values()]
        hooks = {
            id(optimizer): (optimizer, hook) for optimizer in optimizers if (hook := pending(optimizer)) is not None
        }
        if begin is not None:
            call_unbroken([*(hook.drop_call() for _, hook in hooks.values()), begin])
        for optimizer, hook in hooks.values():
            if begin is not None:
                drop(optimizer)
            hook.over = True


def has_grads(optimizer: Any) -> bool:
    """Return True if a parameter has a gradient."""
    return any(getattr(p, "grad", None) is not None for group in optimizer.param_groups for p in group["params"])
