"""All that kernels need to know of an optimizer, gathered once, and the fused step: a check of gradients, an update."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamTensors
from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.planned import PlannedTensors
from ampcompile.kernels.sgd import SgdTensors
from ampcompile.kernels.step import grad_table, step_, table_of, take_copies
from ampcompile.kernels.triton.tables import GradTable, StepTable
from ampcompile.torch_private import dtensors, profiling

from .conditions import (
    NotFusedError,
    number,
    require_kernels,
    require_no_overlap,
    require_plain_tensors,
    require_state,
    require_torchs_own_step,
)
from .copies import CopiesOfStep, there_are_copies
from .masters import NARROW, Masters, masters_of
from .pending import PerDevice
from .steps import new_step, require_counts

log = logging.getLogger(__name__)
Group = Mapping[str, Any]


class Family(NamedTuple):
    """The differences between kinds of optimizers."""

    name: str
    """Of the kernel"""
    tensors: Callable[..., AdamTensors | SgdTensors]
    read: Callable[[Group], tuple[Any, ...]]
    """The settings of a parameter group, in the kernel's order, the learning rate first"""
    kind: Callable[[Group], tuple[bool, ...]]
    """The settings that decide whether a step is fused, and which states it has"""
    prepare: Callable[[Any, Tensor, Group], None]
    """Makes a parameter's state as torch does, if there is none, and checks it"""
    states: Callable[[Group], Mapping[str, str | None]]
    """The names of a parameter's states, by those of the kernel's lists; None where a group has none"""


class Work(NamedTuple):
    """The work on one device."""

    grads: GradTable
    step: StepTable | None
    chosen: list[int]
    """Indices of its gradients, of all that there are"""
    takes_copy: list[bool]
    """True for parameters of which the kernel can write a copy"""


class Plan:
    """The tensors of an optimizer's step as the kernels take them: all that have gradients.

    `only_grads` is enough for a check, and creates no state. Raises `NotFusedError` if the kernels can't take them.
    Holds no tensor, unless some are DTensors, of which it has the local parts: then it is good for one step. A check of
    those would have to ask the other ranks, and is left to torch.
    """

    def __init__(
        self, optimizer: Any, masters: Masters | None, kind: object, only_grads: bool, workspaces: dict[Any, Any]
    ) -> None:
        self.kind, self.workspaces = kind, workspaces
        self.work: dict[torch.device, Work] = {}
        self.settings: np.ndarray = np.empty(0)
        self.rates: list[float | Tensor] = []
        """Settings and learning rates of this step"""
        self._read: list[Any] = []
        self.family, groups = family_of(optimizer), optimizer.param_groups
        every = [param for group in groups for param in group["params"]]
        self._present = [param.grad is not None for param in every]
        weights = list(compress(every, self._present))
        group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
        group_of = list(compress(group_of, self._present))
        grads, params = [param.grad for param in weights], weights
        self.distributed = weights if not only_grads and dtensors.includes(weights) else []
        """All weights if some are DTensors"""
        if self.distributed:
            params, grads = local(weights, weights), local(grads, weights)
        self._local = params if self.distributed else []
        unscales = amp_aware(optimizer) and not self.distributed
        require_right_tensors(params, grads, allow_fp16=unscales, masters=masters)
        states: dict[str, list[Any]] = {}
        if not only_grads:
            states = self._states(optimizer, masters, weights, group_of)
        for device in dict.fromkeys(param.device for param in params):
            chosen = [i for i, param in enumerate(params) if param.device == device]
            rows = {"params": params, "grads": grads, "group_of": group_of, **states}
            tensors = self.family.tensors([], **{name: [row[i] for i in chosen] for name, row in rows.items()})
            step = None if only_grads else table_of(tensors)
            takes_copy = [kept is None for kept in tensors.kept]
            grads_table = grad_table(tensors.grads) if step is None else step.grads
            self.work[device] = Work(grads_table, step, chosen, takes_copy)
        self._alone = len(self.work) == 1
        plain = isinstance(groups, list) and isinstance(optimizer.state, dict) and not dtensors.includes(weights)
        self._tensors = PlannedTensors(groups, None if only_grads else optimizer.state) if plain else None
        self.gradients: Sequence[Tensor] | PlannedTensors = self._tensors or grads

    def _states(
        self, optimizer: Any, masters: Masters | None, weights: list[Tensor], group_of: list[int]
    ) -> dict[str, list[Any]]:
        """Make the states that are missing, and return all as lists for the kernel."""
        groups, family = optimizer.param_groups, self.family
        if family is ADAM:
            require_counts(optimizer, {param.device for param in weights}, own_step=masters is None)
        if masters is not None:
            masters.widen_states(optimizer)
        for weight, index in zip(weights, group_of, strict=True):
            family.prepare(optimizer.state, weight, groups[index])
        if masters is not None:
            masters.prepare(optimizer, weights)
        names = [family.states(group) for group in groups]
        rows: dict[str, list[Any]] = {name: [] for name in ("kept", "checksums", *names[0])}
        for weight, index in zip(weights, group_of, strict=True):
            state = optimizer.state.get(weight, {})
            for row, name in names[index].items():
                rows[row].append(None if name is None else state[name])
            kept = (None, None) if masters is None or weight.dtype not in NARROW else masters.kept(state)
            rows["kept"].append(kept[0])
            rows["checksums"].append(kept[1])
        if self.distributed:
            plain = ("steps", "checksums")
            rows = {name: row if name in plain else local(row, weights) for name, row in rows.items()}
        return rows

    def holds(self, optimizer: Any, kind: object, only_grads: bool) -> bool:
        """Return True if nothing has changed but numbers, and the addresses of gradients, which are read."""
        if self._tensors is None or self.kind != kind or not (only_grads or self._tensors.has_state):
            return False
        groups, state = optimizer.param_groups, None if only_grads else optimizer.state
        if not (found := self._tensors.hold(groups, state)):
            return False
        if found == PlannedTensors.MOVED:
            addresses = self._tensors.addresses
            for work in self.work.values():
                work.grads.addresses[:] = addresses if self._alone else addresses[work.chosen]
        return True

    def read_settings(self, groups: Sequence[Group]) -> None:
        """Read the settings of a step, unless they are numbers and the same as in the last one."""
        read = list(map(self.family.read, groups))
        if not self._read or read != self._read:
            rows = [
                [each for value in row for each in (value if isinstance(value, tuple | list) else (value,))]
                for row in read
            ]
            self.rates = [learning_rate(row[0]) for row in rows]
            rates = [0.0 if isinstance(rate, Tensor) else rate for rate in self.rates]
            values = [[rate, *map(number, row[1:])] for rate, row in zip(rates, rows, strict=True)]
            self.settings = np.array(values, dtype=np.float64)
            fixed = not any(isinstance(value, Tensor) for row in rows for value in row)
            self._read = copy.deepcopy(read) if fixed else []

    def check(
        self, scale: Tensor | None, multipliers: Mapping[torch.device, Tensor], max_norm: float | None = None
    ) -> tuple[PerDevice, PerDevice, Tensor]:
        """Return overflow flags and multipliers by device, and the norm of all gradients; see `check_grads`."""
        checks = {
            device: check_grads(
                work.grads,
                None if scale is None else on(device, scale),
                multipliers.get(device),
                max_norm if self._alone else None,
                self.workspaces.setdefault(device, {}),
            )
            for device, work in self.work.items()
        }
        norms = [check.norm for check in checks.values()]
        found_infs = {device: check.found_inf for device, check in checks.items()}
        factors = {device: check.multiplier for device, check in checks.items()}
        if self._alone or max_norm is None:
            return found_infs, factors, norms[0]
        norm = torch.linalg.vector_norm(torch.stack([on(norms[0].device, norm) for norm in norms]))
        shrink = (max_norm / (norm + 1e-6)).clamp(max=1)
        return found_infs, {device: factor * on(device, shrink) for device, factor in factors.items()}, norm

    def run(self, optimizer: Any, multipliers: Mapping[torch.device, Tensor], found_infs: Iterable[Tensor]) -> None:
        """Update the weights, unless one of `found_infs` isn't 0; bring their copies up to date either way."""
        with profiling.region(f"Optimizer.step#{type(optimizer).__name__}.step"):  # torch's own name
            found_inf, params, written = any_set(found_infs), self._local, []
            if not params and there_are_copies():
                every = [param for group in optimizer.param_groups for param in group["params"]]
                params = list(compress(every, self._present))
            for device, work in self.work.items():
                assert work.step is not None
                workspace = self.workspaces.setdefault(device, {})
                if (
                    params and not self.distributed and there_are_copies()
                ):  # those of DTensors are cast in the next call
                    own = params if self._alone else [params[i] for i in work.chosen]
                    written.append(CopiesOfStep(own, work.takes_copy))
                take_copies(work.step, written[-1].by_kernel if written else {})
                quantized = written[-1].quantized if written else {}
                skip = None if found_inf is None else on(device, found_inf)
                multiplier, name = multipliers.get(device), self.family.name
                step_(name, work.step, self.settings, self.rates, multiplier, skip, workspace, quantized)
            if self._tensors is None:
                torch.autograd.graph.increment_version([*params, *self.distributed])
            else:
                self._tensors.wrote()
            for each in written:
                each.wrote()
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            optimizer._opt_called = True


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
                require_torchs_own_step(optimizer, known_step=masters is not None)
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
        self.reason = None
        self._plan = None if plan.distributed else plan
        return plan


def family_of(optimizer: Any) -> Family:
    """Return the kind of an optimizer of torch's."""
    return SGD if isinstance(optimizer, torch.optim.SGD) else ADAM


def amp_aware(optimizer: Any) -> bool:
    """Return True if an optimizer unscales and skips by itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


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


def require_right_tensors(
    params: list[Tensor], grads: list[Tensor], allow_fp16: bool, masters: Masters | None = None
) -> None:
    """Raise where the kernels can't take these weights and gradients."""
    dtypes = (torch.float32,) if masters is None else (torch.float32, *NARROW)
    for param, grad in zip(params, grads, strict=True):
        require_plain_tensors(param, grad, dtypes)
    # torch unscales float16 gradients only inside fused optimizers; elsewhere torch raises an error.
    if not allow_fp16 and any(grad.dtype is torch.float16 for grad in grads):
        raise NotFusedError("gradients are float16")
    require_kernels({param.device.type for param in params})
    require_no_overlap(params)
    require_no_overlap(grads)


def learning_rate(value: float | Tensor) -> float | Tensor:
    """A learning rate as a number or, so that a captured graph sees it change, as a tensor on the GPU."""
    on_gpu = isinstance(value, Tensor) and value.is_cuda and not value.requires_grad
    return value if on_gpu else number(value)


def _adam_states(group: Group) -> dict[str, str | None]:
    peaks = "max_exp_avg_sq" if group["amsgrad"] else None
    return {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq", "max_exp_avg_sqs": peaks, "steps": "step"}


def _prepare_adam(states: Any, param: Tensor, group: Group) -> None:
    state, moments = states[param], ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    if not state:
        state["step"] = new_step(param, group)
        for name in moments:
            state[name] = torch.zeros_like(param, dtype=torch.float32)
    step = state.get("step")
    if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.numel() != 1:
        raise NotFusedError("its step counts aren't float32 tensors")
    if step.device != param.device:
        state["step"] = step.to(param.device, non_blocking=True)
    for name in moments:
        require_state(state.get(name), param)


def _prepare_sgd(states: Any, param: Tensor, group: Group) -> None:
    """Create a momentum of zeros, with which the first step equals torch's, or check the one there is."""
    assert param.grad is not None
    mixed = param.grad.dtype != param.dtype == torch.float32 and not group["fused"]  # torch's fused step raises
    if mixed and group["weight_decay"] and group["maximize"]:
        raise NotFusedError(f"torch decays weights in {param.grad.dtype}, the gradients' type")
    if group["momentum"] == 0:
        return
    state = states[param]
    if state.get("momentum_buffer") is None:
        if group["dampening"] != 0:
            raise NotFusedError("a first step with dampening isn't like the others")
        if mixed and not group["weight_decay"]:
            raise NotFusedError(f"torch keeps momentum in {param.grad.dtype}, the gradients' type")
        state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
    require_state(state["momentum_buffer"], param)


ADAM = Family(
    "adam",
    AdamTensors,
    itemgetter("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    lambda group: (group["amsgrad"], group["fused"], group["capturable"]),
    _prepare_adam,
    _adam_states,
)
SGD = Family(
    "sgd",
    SgdTensors,
    itemgetter("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"),
    lambda group: (group["momentum"] != 0, bool(group["weight_decay"]), group["maximize"], group["fused"]),
    _prepare_sgd,
    lambda group: {"momentum_buffers": "momentum_buffer" if group["momentum"] != 0 else None},
)
