"""All that kernels need to know of an optimizer, gathered once, and the fused step: a check of gradients, an update."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.native import group_values
from ampcompile.kernels.planned import PlannedTensors
from ampcompile.kernels.step import grad_table, step_, table_of, take_copies
from ampcompile.kernels.tables import GradTable, StepTable
from ampcompile.torch_private import dtensors
from ampcompile.weights import Form, writable_copies
from ampcompile.weights.copies import cast_into
from ampcompile.weights.store import store

from .conditions import NotFusedError, number, require_known_step, require_right_tensors
from .families import ADAM, Group, amp_aware, family_of, parameters, require_counts
from .masters import NARROW, Masters, masters_of

log = logging.getLogger(__name__)
PerDevice = dict[torch.device, Tensor]
Gradients = Sequence[Tensor] | PlannedTensors


class Work(NamedTuple):
    """The work on one device."""

    grads: GradTable
    step: StepTable | None
    chosen: list[int]
    """Indices of its gradients, of all that there are"""


class Plan:
    """The tensors of an optimizer's step as the kernels take them: all that have gradients.

    `only_grads` is enough for a check, and creates no state. Raises `NotFusedError` if the kernels can't take them.
    Holds no tensor, unless some are DTensors: of their gradients it has the local parts, and is good for one step. A
    check of those would have to ask the other ranks, and is left to torch.
    """

    settings: np.ndarray
    rates: list[float | Tensor]
    """Settings and learning rates of this step"""

    def __init__(
        self, optimizer: Any, masters: Masters | None, kind: object, only_grads: bool, workspaces: dict[Any, Any]
    ) -> None:
        self.kind, self.workspaces = kind, workspaces
        self.work: dict[torch.device, Work] = {}
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
        self.distributed = not only_grads and dtensors.includes(weights)
        if self.distributed:
            params, grads = local(weights, weights), local(grads, weights)
        # torch unscales float16 gradients only inside fused optimizers; elsewhere torch raises an error.
        unscales = amp_aware(optimizer) and not self.distributed
        dtypes = (torch.float32,) if masters is None else (torch.float32, *NARROW)
        require_right_tensors(params, grads, dtypes, allow_fp16=unscales)
        states = {} if only_grads else self._states(optimizer, masters, weights, group_of)
        if any(isinstance(value, Tensor) and value.is_neg() for row in states.values() for value in row):
            raise NotFusedError("its state is a negated view")
        rows: dict[str, list[Any]] = {"params": params, "grads": grads, "group_of": group_of, **states}
        for device in dict.fromkeys(param.device for param in params):
            chosen = [i for i, param in enumerate(params) if param.device == device]
            tensors = self.family.tensors([], **{name: [row[i] for i in chosen] for name, row in rows.items()})
            step = None if only_grads else table_of(tensors)
            self.work[device] = Work(grad_table(tensors.grads) if step is None else step.grads, step, chosen)
        self._tensors: PlannedTensors | None = None
        if not self.distributed:
            try:
                self._tensors = PlannedTensors(groups, None if only_grads else optimizer.state)
            except TypeError as reason:
                raise NotFusedError(str(reason)) from None
        self.gradients: Gradients = self._tensors or grads

    def _states(
        self, optimizer: Any, masters: Masters | None, weights: list[Tensor], group_of: list[int]
    ) -> dict[str, list[Any]]:
        """Make the states that are missing, and return all as lists for the kernel."""
        groups, family = optimizer.param_groups, self.family
        if family is ADAM:
            require_counts(optimizer, {param.device for param in weights})
        if masters is not None:
            masters.widen_states(optimizer)
        for weight, index in zip(weights, group_of, strict=True):
            family.prepare(optimizer.state, weight, groups[index])
        if masters is not None:
            masters.prepare(optimizer, weights)
        states = [optimizer.state.get(weight, {}) for weight in weights]
        names = [family.states(groups[index]) for index in group_of]
        rows: dict[str, list[Any]] = {
            row: [None if of[row] is None else state[of[row]] for of, state in zip(names, states, strict=True)]
            for row in family.states(groups[0])
        }
        if masters is not None:
            rows |= masters.read(states, weights)
        if self.distributed:
            plain = ("steps", "checksums")
            rows = {name: row if name in plain else local(row, weights) for name, row in rows.items()}
        return rows

    def holds(self, optimizer: Any, kind: object, only_grads: bool) -> bool:
        """Return True if nothing has changed but numbers, and the addresses of gradients, which are read."""
        if self._tensors is None or self.kind != kind or not (only_grads or self._tensors.has_state):
            return False
        if not (found := self._tensors.hold(optimizer.param_groups, None if only_grads else optimizer.state)):
            return False
        if found == PlannedTensors.MOVED:
            addresses = self._tensors.addresses
            for work in self.work.values():
                work.grads.addresses[:] = addresses if len(self.work) == 1 else addresses[work.chosen]
        return True

    def read_settings(self, groups: Sequence[Group]) -> None:
        """Read the settings of a step, unless they are numbers and the same as in the last one."""
        read = list(map(self.family.read, groups))
        if not self._read or read != self._read:
            numbers = [row._make([learning_rate(row.lr), *map(number, row[1:])]) for row in read]
            self.rates, self.settings = [row.lr for row in numbers], group_values(numbers)
            self._read = [] if any(isinstance(value, Tensor) for row in read for value in row) else read

    def check(
        self, scale: Tensor | None, multipliers: Mapping[torch.device, Tensor], max_norm: float | None = None
    ) -> tuple[PerDevice, PerDevice, Tensor]:
        """Return overflow flags and multipliers by device, and the norm of all gradients; see `check_grads`."""
        alone = len(self.work) == 1
        checks = {
            device: check_grads(
                work.grads,
                None if scale is None else on(device, scale),
                multipliers.get(device),
                max_norm if alone else None,
                self.workspaces.setdefault(device, {}),
            )
            for device, work in self.work.items()
        }
        norms = [check.norm for check in checks.values()]
        found_infs = {device: check.found_inf for device, check in checks.items()}
        factors = {device: check.multiplier for device, check in checks.items()}
        if alone or max_norm is None:
            return found_infs, factors, norms[0]
        norm = torch.linalg.vector_norm(torch.stack([on(norms[0].device, norm) for norm in norms]))
        shrink = (max_norm / (norm + 1e-6)).clamp(max=1)
        return found_infs, {device: factor * on(device, shrink) for device, factor in factors.items()}, norm

    def run(self, optimizer: Any, multipliers: Mapping[torch.device, Tensor], found_infs: Iterable[Tensor]) -> None:
        """Update the weights, unless one of `found_infs` isn't 0; bring their copies up to date either way."""
        found_inf, weights, copies = any_set(found_infs), [], []
        writes_copies = bool(store.keys) and not self.distributed  # those of DTensors are cast in the next call
        if writes_copies or self.distributed:
            weights = list(compress(parameters(optimizer), self._present))
        with ExitStack() as closing:
            for device, work in self.work.items():
                assert work.step is not None
                by_kernel, quantized = {}, {}
                if writes_copies:
                    own = weights if len(self.work) == 1 else [weights[i] for i in work.chosen]
                    copies.append(CopiesOfStep(own))
                    closing.callback(copies[-1].writable.close)
                    by_kernel, quantized = copies[-1].by_kernel, copies[-1].quantized
                take_copies(work.step, by_kernel)
                skip = None if found_inf is None else on(device, found_inf)
                workspace, multiplier = self.workspaces.setdefault(device, {}), multipliers.get(device)
                step_(self.family.name, work.step, self.settings, self.rates, multiplier, skip, workspace, quantized)
            if self._tensors is None:
                torch.autograd.graph.increment_version([*weights, *local(weights, weights)])
            else:
                self._tensors.wrote()
            for each in copies:
                each.wrote()


class Plans:
    """The latest plan of an optimizer, made anew if something that it depends on has changed."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        """The consequence for a step if there is no plan; for the log"""
        self._plan: Plan | None = None
        self.workspaces: dict[torch.device, dict[str, Any]] = {}
        """The buffers that kernels keep between calls"""
        self.reason: str | None = None
        """The reason that there is no plan"""

    def of(self, optimizer: Any, only_grads: bool = False, in_step: bool = False) -> Plan | None:
        """Return the plan of an optimizer's step, or None if the kernels can't take it.

        `in_step`: the optimizer's own step asks, with its hooks around it.
        """
        plan, self._plan = self._plan, None
        try:
            masters = masters_of(optimizer)
            if not in_step:
                require_known_step(optimizer)
            kinds = list(map(family_of(optimizer).kind, optimizer.param_groups))
            kind = kinds, amp_aware(optimizer), masters
            if plan is None or not plan.holds(optimizer, kind, only_grads):
                plan = Plan(optimizer, masters, kind, only_grads, self.workspaces)
            if not only_grads:
                plan.read_settings(optimizer.param_groups)
        except NotFusedError as reason:
            if self.reason != str(reason):
                self.reason = str(reason)
                log.info("the step of %s %s: %s", type(optimizer).__name__, self._consequence, reason)
            return None
        if not only_grads:  # the gradients alone don't tell
            self.reason = None
        self._plan = None if plan.distributed else plan
        return plan


def on(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on a device; the host doesn't wait."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def any_set(found_infs: Iterable[Tensor]) -> Tensor | None:
    """Return one flag that isn't 0 if any of these isn't, on the device of the first; None if there are none."""
    flags = list(found_infs)
    if len(flags) <= 1:
        return flags[0] if flags else None
    return torch.stack([on(flags[0].device, flag).reshape(()) for flag in flags]).ne(0).any().float()


def local(tensors: Sequence[Any], weights: Sequence[Tensor]) -> list[Any]:
    """Return this rank's parts of gradients, states or the weights themselves."""
    if (parts := dtensors.local_parts(tensors, weights)) is None:
        raise NotFusedError("a gradient or a state isn't distributed over the ranks as its parameter is")
    return parts


def learning_rate(value: float | Tensor) -> float | Tensor:
    """A learning rate as a number or, so that a captured graph sees it change, as a tensor on the GPU."""
    on_gpu = isinstance(value, Tensor) and value.is_cuda and not value.requires_grad
    return value if on_gpu else number(value)


QUANTIZED = Form(torch.float8_e4m3fn)


class CopiesOfStep:
    """The copies of these parameters, all on one device, that a step may write; they count as stale until `wrote`."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.by_kernel: dict[int, Tensor] = {}
        """Of float32 parameters the first 16-bit copy, which kernels write with the weight; by the parameter's index"""
        self.quantized: dict[int, tuple[Tensor, Tensor]] = {}
        """Quantized ones that the kernels write too, with the parameters, by their indices"""
        self.writable = writable_copies(params)
        self._others: list[tuple[Form, Tensor, Tensor]] = []
        for i, buffers in self.writable.buffers.items():
            for form, buffer in buffers.items():
                if form == QUANTIZED and params[i].is_contiguous():
                    self.quantized[i] = buffer, params[i]
                elif params[i].dtype == torch.float32 and not form.quantized and i not in self.by_kernel:
                    self.by_kernel[i] = buffer
                else:
                    self._others.append((form, buffer, params[i]))

    def wrote(self) -> None:
        """Mark the copies as fresh; call it when kernels have written, and versions of weights were raised."""
        quantized = [buffer for buffer, _ in self.quantized.values()]
        torch.autograd.graph.increment_version([*self.by_kernel.values(), *quantized])
        cast_into(self._others)
        self.writable.mark_written()
