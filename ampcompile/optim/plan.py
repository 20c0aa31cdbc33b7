"""All that kernels need to know of an optimizer, gathered once, and the fused step: a check of gradients, an update.

Torch keeps Adam's step counts on the CPU unless the optimizer is `fused` or `capturable`. The fused step needs them on
the GPU, which decides whether a step counts. They are moved back before torch's own step or `state_dict()` reads them:
in one copy, for which the host waits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ampcompile.errors import OptimizerError
from ampcompile.kernels import native, planned, tables
from ampcompile.kernels.adam import AdamGroup, AdamTensors
from ampcompile.kernels.check_grads import Checked, check_grads
from ampcompile.kernels.planned import Change, PlannedTensors, share_memory
from ampcompile.kernels.sgd import SgdGroup, SgdTensors
from ampcompile.kernels.step import grad_table, step_, table_of, take_copies
from ampcompile.kernels.tables import GradTable, StepTable
from ampcompile.torch_private import dispatcher, marks, optimizers, storages
from ampcompile.weights import writable_copies
from ampcompile.weights.store import store

if TYPE_CHECKING:
    from .fused_step import FusedStep
    from .masters import Masters
    from .states import States

PLAIN = (torch.nn.Parameter, Tensor)
NARROW = (torch.bfloat16, torch.float16)
GRAD_DTYPES = (torch.float32, *NARROW)


class NotFusedError(Exception):
    """The reason that a step is torch's own; never leaves `optim` and `scaler`."""


def obstacle_of(optimizer: Any) -> str | None:
    """Return why an optimizer can't take a scaler's scale and overflow flag in a fused step; None if it can."""
    known = getattr(optimizer, "_ampcompile_step", None)
    if (mode := dispatcher.acting_mode()) is not None:
        return f"{mode} has to see its operations"
    if known is None and type(optimizer) not in optimizers.TORCHS:
        return f"{type(optimizer).__name__} isn't torch's SGD, Adam or AdamW, nor ours"
    if known is not None and known.optimizer() is not optimizer:
        return f"it is wrapped in a {type(optimizer).__name__}"
    if known is None and (step := optimizers.replaced_step(optimizer)) is not None:
        return f"its step is wrapped by {step}"
    if (wrapper := optimizers.foreign_step(optimizer)) is not None:
        return f"its step is wrapped by {wrapper}"
    if (hook := optimizers.foreign_hook(optimizer)) is not None:
        return f"a step hook is registered: {hook}"
    return "grad_scale or found_inf is set on it" if {"grad_scale", "found_inf"} & vars(optimizer).keys() else None


def require_tensors(name: str, tensors: Sequence[Tensor], dtypes: Collection[torch.dtype]) -> None:
    """Raise where the kernels can't take these parameters or gradients: they read dense tensors on one device, in any
    order, so no element may occur twice.
    """
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            raise NotFusedError(f"a {name} is a {type(tensor).__name__}")
        if storages.is_wrapped(tensor):
            raise NotFusedError(f"a {name} is one of a transform of torch.func")
        if tensor.layout is not torch.strided:
            raise NotFusedError(f"a {name} is {tensor.layout}")
        if tensor.is_neg() or tensor.is_inference():
            raise NotFusedError(f"a {name} is a negated view or an inference tensor")
        if tensor.dtype not in dtypes:
            raise NotFusedError(f"a {name} is {tensor.dtype}")
        if not (tensor.is_contiguous() or storages.is_dense(tensor)):  # the second takes long
            raise NotFusedError(f"a {name} has strides {tensor.stride()}")
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        raise NotFusedError(f"{name}s are on {' and '.join(sorted(map(str, devices)))}")
    for device_type in (device.type for device in devices):
        if device_type not in ("cpu", "cuda"):
            raise NotFusedError(f"there are no fused kernels for {device_type}")
        if not planned.available() or (device_type == "cpu" and not native.available()):
            raise NotFusedError("no C++ compiler works here")
        if device_type == "cuda" and importlib.util.find_spec("triton") is None:
            raise NotFusedError("triton isn't installed")
    if share_memory(tensors):
        raise NotFusedError(f"two {name}s share memory")


def require_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise where the kernels can't take gradients with their parameters: both have one device and layout."""
    for param, grad in zip(params, grads, strict=True):
        if grad.device != param.device:
            raise NotFusedError("a gradient is on another device than its parameter")
        if not same_layout(grad, param):
            raise NotFusedError(f"a parameter has strides {param.stride()}, its gradient {grad.stride()}")


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return True if dense tensors have elements at equal offsets; strides of dimensions of size 1 don't matter."""
    if a.is_contiguous() and b.is_contiguous():
        return a.numel() == b.numel()
    if a.shape != b.shape:
        return False
    return all(size < 2 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def require_state(state: Any, param: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise unless a tensor of a parameter's state is as torch's optimizers make it."""
    if (parts := storages.local_parts([state, param], [param, param])) is None:
        raise NotFusedError("its state isn't distributed over the ranks as the parameters are")
    state, param = parts
    if type(state) is not Tensor or storages.is_wrapped(state) or state.dtype != dtype or state.device != param.device:
        name = str(dtype).removeprefix("torch.")
        raise NotFusedError(f"its state isn't {name} tensors on the parameters' device")
    if not same_layout(state, param):
        raise NotFusedError("its state has other strides than the parameters")


def number(value: float | Tensor) -> float:
    """A hyper-parameter as a number, without a host sync."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype in (torch.float16, torch.bfloat16):
        raise NotFusedError(f"a hyper-parameter is a tensor of {value.dtype}, in which torch computes with it")
    if value.requires_grad or not value.is_cpu:
        raise NotFusedError("a hyper-parameter is a tensor that requires grad, or isn't on the CPU")
    return float(value.reshape(()).numpy())


Group = Mapping[str, Any]


class Family(NamedTuple):
    """The differences between kinds of optimizers."""

    tensors: type[AdamTensors] | type[SgdTensors]
    read: Callable[[Group], Any]
    """The settings of a parameter group as the kernel takes them, `AdamGroup` or `SgdGroup`"""
    kind: tuple[str, ...]
    """The settings that decide, if they are 0 or not, whether a step is fused, and which states it has"""
    prepare: Callable[[Any, Tensor, Group, bool], None]
    """Makes a parameter's state as torch does, if there is none, and checks it; but for moments that are coded"""


def family_of(optimizer: Any) -> Family:
    """Return the kind of an optimizer of torch's."""
    return SGD if isinstance(optimizer, torch.optim.SGD) else ADAM


def amp_aware(optimizer: Any) -> bool:
    """Return True if an optimizer unscales and skips by itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def parameters(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients(optimizer: Any) -> list[Tensor]:
    """All gradients of an optimizer."""
    return [grad for param in parameters(optimizer) if (grad := getattr(param, "grad", None)) is not None]


def new_step(param: Tensor, group: Group) -> Tensor:
    """A step count of zero, with the dtype and device that torch would choose."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    device = param.device if counts_on_device(group) else "cpu"
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def counts_on_device(group: Group) -> bool:
    """Return True if torch keeps the step counts of a parameter group on its parameters' device."""
    return bool(group["fused"] or group["capturable"])


def require_counts(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    """Raise OptimizerError for a CUDA graph's capture of steps whose counts torch keeps on the CPU.

    Once they are moved back, replays would go on counting in the tensors on the GPU.
    """
    if not all(map(counts_on_device, optimizer.param_groups)) and params and tables.capturing(params[0].device):
        raise OptimizerError(
            f"found a CUDA graph capture of a step of {type(optimizer).__name__} that counts its steps on the CPU, "
            "expected one that counts on the GPU: make the optimizer with capturable=True or fused=True"
        )


@marks.run_untraced
def move_step_counts_to_cpu(optimizer: Any, *_: Any) -> None:
    """Move all counts, if the optimizer has some, back to the device where torch keeps them."""
    if family_of(optimizer) is SGD:
        return
    params = [p for group in optimizer.param_groups if not counts_on_device(group) for p in group["params"]]
    states = [state for param in params if (state := optimizer.state.get(param)) and not state["step"].is_cpu]
    for device in {state["step"].device for state in states}:
        on_device = [state for state in states if state["step"].device == device]
        counts = torch.stack([state["step"].reshape(()) for state in on_device]).cpu()
        for state, count in zip(on_device, counts.unbind(), strict=True):
            state["step"] = count.clone()


def _read_adam(group: Group) -> AdamGroup:
    names = ("eps", "weight_decay", "decoupled_weight_decay", "maximize")
    return AdamGroup(group["lr"], *group["betas"], *[group[name] for name in names])


def _prepare_adam(states: Any, param: Tensor, group: Group, coded: bool) -> None:
    state, moments = states[param], ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    moments = () if coded else moments
    if not state:
        state["step"] = new_step(param, group)
        for name in moments:
            state[name] = torch.zeros_like(param, dtype=torch.float32)
    step = state.get("step")
    if type(step) is not Tensor or storages.is_wrapped(step) or step.dtype != torch.float32 or step.numel() != 1:
        raise NotFusedError("its step counts aren't float32 tensors")
    if step.device != param.device:
        state["step"] = step.to(param.device, non_blocking=True)
    for name in moments:
        require_state(state.get(name), param)


def _prepare_sgd(states: Any, param: Tensor, group: Group, coded: bool) -> None:
    """Create a momentum of zeros, with which the first step equals torch's, or check the one there is."""
    assert param.grad is not None
    mixed = param.grad.dtype != param.dtype == torch.float32 and not group["fused"]  # torch's fused step raises
    if mixed and group["weight_decay"] and group["maximize"]:
        raise NotFusedError(f"torch decays weights in {param.grad.dtype}, the gradients' type")
    if group["momentum"] == 0:
        return
    state = states[param]
    if state.get("momentum_buffer_codes" if coded else "momentum_buffer") is None:
        if group["dampening"] != 0:
            raise NotFusedError("a first step with dampening isn't like the others")
        if mixed and not group["weight_decay"]:
            raise NotFusedError(f"torch keeps momentum in {param.grad.dtype}, the gradients' type")
        if not coded:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
    if not coded:
        require_state(state["momentum_buffer"], param)


ADAM = Family(AdamTensors, _read_adam, ("amsgrad", "fused", "capturable", "differentiable"), _prepare_adam)
SGD = Family(
    SgdTensors,
    lambda group: SgdGroup(*[group[name] for name in SgdGroup._fields]),
    ("momentum", "weight_decay", "maximize", "fused", "differentiable"),
    _prepare_sgd,
)


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

    def __init__(self, optimizer: Any, step: FusedStep, kind: object, only_grads: bool) -> None:
        self.kind, self.only_grads = kind, only_grads
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
        require_tensors("parameter", params, step.dtypes)
        # torch unscales float16 gradients only inside fused optimizers; elsewhere torch raises an error.
        unscales = amp_aware(optimizer) and not self.distributed
        require_tensors("gradient", grads, GRAD_DTYPES if unscales else (torch.float32, torch.bfloat16))
        require_alike(params, grads)
        states = {} if only_grads else self._states(optimizer, step.masters, step.states, weights, group_of)
        if any(isinstance(value, Tensor) and value.is_neg() for row in states.values() for value in row):
            raise NotFusedError("its state is a negated view")
        self.count = len(params)
        if self.count:
            self.device = params[0].device
            self._workspace: dict[str, Any] = step.workspaces.setdefault(self.device, {})
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
        self, optimizer: Any, masters: Masters | None, coder: States | None, weights: list[Tensor], group_of: list[int]
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
        numbers = {id(param): number for number, param in enumerate(parameters(optimizer))} if coder else {}
        coding: list[Any] = []
        for weight, index in zip(weights, group_of, strict=True):
            coded = coder is not None and coder.codes(weight, groups[index])
            family.prepare(optimizer.state, weight, groups[index], coded)
            state = optimizer.state[weight] if coded else {}
            coding.append(coder.prepare(weight, state, groups[index], numbers[id(weight)]) if coder and coded else None)
        beside = {} if masters is None else masters.prepare(optimizer, weights)
        states = [optimizer.state.get(weight, {}) for weight in weights]
        optional, setting = family.tensors.OPTIONAL
        has_optional = [bool(groups[index][setting]) for index in group_of]
        rows: dict[str, list[Any]] = {
            row: [
                state.get(f"{name}_codes", state.get(name)) if has or row != optional else None
                for has, state in zip(has_optional, states, strict=True)
            ]
            for row, name in family.tensors.STATES.items()
        }
        coding = [own or other for own, other in zip(coding, beside.pop("coding", coding), strict=True)]
        rows |= beside | {"coding": coding}
        for name in family.tensors.OF_CODED:
            rows[name] = [state["step"] if code else None for state, code in zip(states, coding, strict=True)]
        if self.distributed:
            plain = ("steps", "checksums", "coding")
            rows = {name: row if name in plain else local_parts(row, weights) for name, row in rows.items()}
        return rows

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
            self.rates, self.settings = numbers_of(read)
            self._read = [] if any(isinstance(value, Tensor) for row in read for value in row) else read

    def check(self, scale: Tensor | None, multiplier: Tensor | None, max_norm: float | Tensor | None = None) -> Checked:
        """Check the gradients, of which there are some; see `check_grads`."""
        scale = None if scale is None else on_device(self.device, scale)
        return check_grads(self._grads, scale, multiplier, max_norm, self._workspace)

    def run(self, optimizer: Any, multiplier: Tensor | None, found_inf: Tensor | None) -> None:
        """Update the weights, unless `found_inf` isn't 0; bring their copies up to date either way."""
        if not self.count:
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


def numbers_of(read: Sequence[Any]) -> tuple[list[float | Tensor], np.ndarray]:
    """Learning rates and settings, of what a family reads of the groups, as the kernels take them."""
    numbers = [row._make([learning_rate(row.lr), *map(number, row[1:])]) for row in read]
    return [row.lr for row in numbers], native.group_values(numbers)


def on_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on a device; the host doesn't wait."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def any_set(found_infs: Iterable[Tensor]) -> Tensor | None:
    """Return one flag that isn't 0 if any of these isn't, on the device of the first; None if there are none."""
    flags = [storages.unwrapped(flag) if storages.is_wrapped(flag) else flag for flag in found_infs]
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
