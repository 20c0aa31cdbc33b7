"""All that kernels need to know of an optimizer, gathered once, and the fused step: a check of gradients, an update."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels.check_grads import Checked, check_grads
from ampcompile.kernels.native import group_values
from ampcompile.kernels.planned import Change, PlannedTensors
from ampcompile.kernels.step import grad_table, step_, table_of, take_copies
from ampcompile.kernels.tables import GradTable, StepTable
from ampcompile.torch_private import storages
from ampcompile.weights import writable_copies
from ampcompile.weights.store import store

from .conditions import GRAD_DTYPES, NotFusedError, number, require_alike, require_tensors
from .families import ADAM, Group, amp_aware, family_of, parameters, require_counts
from .masters import NARROW, Masters

Gradients = Sequence[Tensor] | PlannedTensors


class Plan:
    """The tensors of an optimizer's step as the kernels take them: all that have gradients, on one device.

    `only_grads` is enough for a check, and creates no state. Raises `NotFusedError` if the kernels can't take them.
    Holds no tensor, unless some are DTensors: of their gradients it has the local parts, and is good for one step. A
    check of those would have to ask the other ranks, and is left to torch.
    """

    settings: np.ndarray
    rates: list[float | Tensor]  # settings and learning rates of this step
    device: torch.device
    _grads: GradTable  # unset if there are no gradients
    _step: StepTable  # unset for `only_grads`, too

    def __init__(
        self, optimizer: Any, masters: Masters | None, kind: object, only_grads: bool, workspaces: dict[Any, Any]
    ) -> None:
        self.kind = kind
        self._read: list[Any] = []
        self.family, groups = family_of(optimizer), optimizer.param_groups
        if any(group["differentiable"] for group in groups):
            raise NotFusedError("it is differentiable")
        every = parameters(optimizer)
        self._present = [param.grad is not None for param in every]
        weights = list(compress(every, self._present))
        group_of = [index for index, group in enumerate(groups) for param in group["params"] if param.grad is not None]
        grads: list[Any] = [param.grad for param in weights]
        params = weights
        self.distributed = not only_grads and storages.include_dtensors(weights)
        if self.distributed:
            params, grads = local_parts(weights, weights), local_parts(grads, weights)
        require_tensors("parameter", params, (torch.float32,) if masters is None else (torch.float32, *NARROW))
        # torch unscales float16 gradients only inside fused optimizers; elsewhere torch raises an error.
        unscales = amp_aware(optimizer) and not self.distributed
        require_tensors("gradient", grads, GRAD_DTYPES if unscales else (torch.float32, torch.bfloat16))
        require_alike(params, grads)
        states = {} if only_grads else self._states(optimizer, masters, weights, group_of)
        if any(isinstance(value, Tensor) and value.is_neg() for row in states.values() for value in row):
            raise NotFusedError("its state is a negated view")
        self.count = len(params)
        if not self.empty:
            self.device = params[0].device
            self._workspace: dict[str, Any] = workspaces.setdefault(self.device, {})
            if only_grads:
                self._grads = grad_table(grads)
            else:
                self._step = table_of(self.family.tensors([], params=params, grads=grads, group_of=group_of, **states))
                self._grads = self._step.grads
        self._tensors: PlannedTensors | None = None
        if not self.distributed:
            try:
                self._tensors = PlannedTensors(groups, None if only_grads else optimizer.state)
            except TypeError as reason:
                raise NotFusedError(str(reason)) from None
        self.gradients: Gradients = self._tensors or grads

    def _states(
        self, optimizer: Any, masters: Masters | None, weights: list[Tensor], group_of: list[int]
    ) -> dict[str, Any]:
        """Make the states that are missing, and return all as lists for the kernel."""
        groups, family = optimizer.param_groups, self.family
        for weight in weights:
            for name, value in (state := optimizer.state.get(weight, {})).items():
                state[name] = storages.unwrapped(value)  # what a step within a transform has left
        if family is ADAM:
            require_counts(optimizer, weights)
        if masters is not None:
            masters.widen_states(optimizer)
        for weight, index in zip(weights, group_of, strict=True):
            family.prepare(optimizer.state, weight, groups[index])
        beside = {} if masters is None else masters.prepare(optimizer, weights)
        states = [optimizer.state.get(weight, {}) for weight in weights]
        optional, setting = family.tensors.OPTIONAL
        has_optional = [bool(groups[index][setting]) for index in group_of]
        rows: dict[str, list[Any]] = {
            row: [
                state[name] if has or row != optional else None for has, state in zip(has_optional, states, strict=True)
            ]
            for row, name in family.tensors.STATES.items()
        }
        rows |= beside
        if self.distributed:
            plain = ("steps", "checksums")
            rows = {name: row if name in plain else local_parts(row, weights) for name, row in rows.items()}
        return rows

    @property
    def empty(self) -> bool:
        """True if there are no gradients."""
        return self.count == 0

    def holds(self, optimizer: Any, kind: object, only_grads: bool) -> bool:
        """Return True if nothing has changed but numbers, and the addresses of gradients, which are read."""
        if self._tensors is None or self.kind != kind or not (only_grads or self._tensors.has_state):
            return False
        change = self._tensors.compare(optimizer.param_groups, None if only_grads else optimizer.state)
        if change is Change.OTHER:
            return False
        if change is Change.GRADIENTS_MOVED:
            self._grads.addresses[:] = self._tensors.addresses
        return True

    def read_settings(self, groups: Sequence[Group]) -> None:
        """Read the settings of a step, unless they are numbers and the same as in the last one."""
        read = list(map(self.family.read, groups))
        if not self._read or read != self._read:
            numbers = [row._make([learning_rate(row.lr), *map(number, row[1:])]) for row in read]
            self.rates, self.settings = [row.lr for row in numbers], group_values(numbers)
            self._read = [] if any(isinstance(value, Tensor) for row in read for value in row) else read

    def check(self, scale: Tensor | None, multiplier: Tensor | None, max_norm: float | None = None) -> Checked:
        """Check the gradients, of which there are some; see `check_grads`."""
        scale = None if scale is None else on_device(self.device, scale)
        return check_grads(self._grads, scale, multiplier, max_norm, self._workspace)

    def run(self, optimizer: Any, multiplier: Tensor | None, found_inf: Tensor | None) -> None:
        """Update the weights, unless `found_inf` isn't 0; bring their copies up to date either way."""
        if self.empty:
            return
        writes_copies = bool(store.keys) and not self.distributed  # those of DTensors are cast in the next call
        weights = list(compress(parameters(optimizer), self._present)) if writes_copies or self.distributed else []
        multiplier, skip = (None if each is None else on_device(self.device, each) for each in (multiplier, found_inf))
        copies = writable_copies(weights) if writes_copies else NO_COPIES
        with closing(copies):
            take_copies(self._step, copies.by_kernel)
            settings = self._step, self.settings, self.rates
            step_(self.family.tensors.NAME, *settings, multiplier, skip, self._workspace, copies.quantized)
            if self._tensors is None:
                torch.autograd.graph.increment_version(weights)  # once, see `mark_written`
                if self.distributed:
                    torch.autograd.graph.increment_version(local_parts(weights, weights))
            else:
                self._tensors.bump_versions()
            copies.mark_written()


def on_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on a device; the host doesn't wait."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def any_set(found_infs: Iterable[Tensor]) -> Tensor | None:
    """Return one flag that isn't 0 if any of these isn't, on the device of the first; None if there are none."""
    flags = list(map(storages.unwrapped, found_infs))
    if len(flags) <= 1:
        return flags[0] if flags else None
    return torch.stack([on_device(flags[0].device, flag).reshape(()) for flag in flags]).ne(0).any().float()


def local_parts(tensors: Sequence[Any], weights: Sequence[Tensor]) -> list[Any]:
    """Return this rank's parts of gradients, states or the weights themselves."""
    if (parts := storages.local_parts(tensors, weights)) is None:
        raise NotFusedError("a gradient or a state isn't distributed over the ranks as its parameter is")
    return parts


def learning_rate(value: float | Tensor) -> float | Tensor:
    """A learning rate as a number or, so that a captured graph sees it change, as a tensor on the GPU."""
    on_gpu = isinstance(value, Tensor) and value.is_cuda and not value.requires_grad and value.dtype not in NARROW
    return value if on_gpu else number(value)


NO_COPIES = writable_copies(())
