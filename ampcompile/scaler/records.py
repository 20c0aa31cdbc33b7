"""What the scaler knows about each optimizer, as long as the optimizer lives."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError

from .collect import Known
from .fused import any_set
from .pending import call_unbroken, parameters, pending


@dataclass
class Record:
    """What the scaler knows about one optimizer."""

    optimizer: Callable[[], Any]
    workspaces: dict[torch.device, dict[str, Any]] = field(default_factory=dict)
    """What kernels keep between calls."""
    known: dict[bool, Known] = field(default_factory=dict)
    """What was found right about the optimizer's tensors."""
    found_infs: tuple[Tensor, ...] | None = None
    """Overflow flags of the latest step; None before the first."""
    detour: str | None = None
    """Why the latest step took the generic path."""

    def skipped(self) -> Tensor:
        """Whether the latest step was skipped: 0-dim bool on the device."""
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
        """What was left for steps that weren't taken is dropped if it unscales, else if the gradients change.

        `begin`: of a scaler that scales, a function of C that begins the next iteration for it, in one with the drop.
        """
        optimizers = [record.optimizer() for record in self._by_id.values()]
        lefts = [left for optimizer in optimizers if (left := pending(optimizer)) is not None]
        if begin is not None:
            call_unbroken([*(left.dropping() for left in lefts), begin])
        for left in lefts:
            if begin is not None:
                left.drop()
            left.over = True


def has_grads(optimizer: Any) -> bool:
    """Whether a parameter has a gradient."""
    return any(getattr(p, "grad", None) is not None for group in optimizer.param_groups for p in group["params"])
