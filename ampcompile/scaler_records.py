"""What the scaler knows about each optimizer, as long as the optimizer lives."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.scaler_fused import PerDevice, any_set


@dataclass
class Record:
    """What the scaler knows about one optimizer."""

    optimizer: Callable[[], Any]
    workspaces: dict[torch.device, dict[str, Any]] = field(default_factory=dict)
    """What kernels keep between calls."""
    multipliers: PerDevice = field(default_factory=dict)
    """What a fused `clip_grad_norm_` left for the step to multiply gradients by."""
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

    def settle(self) -> None:
        """Multiply the gradients themselves by what the step was to multiply them by: it won't be a fused one."""
        grads = [param.grad for param in parameters(self.optimizer()) if param.grad is not None]
        with torch.no_grad():
            for device, multiplier in self.multipliers.items():
                torch._foreach_mul_([grad for grad in grads if grad.device == device], multiplier)
        self.multipliers = {}


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

    def end_iteration(self) -> None:
        """Drop what was left for steps that weren't taken."""
        for record in self._by_id.values():
            record.multipliers = {}


def parameters(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def has_grads(optimizer: Any) -> bool:
    """Whether a parameter has a gradient."""
    return any(getattr(p, "grad", None) is not None for group in optimizer.param_groups for p in group["params"])
