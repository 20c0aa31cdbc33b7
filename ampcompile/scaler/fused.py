"""The fused step: everything it reads and writes, gathered by device; then one check, one update."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_
from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.sgd import SgdGroup, SgdTensors, sgd_
from ampcompile.weights.binding import writable_copies, wrote

from .conditions import (
    NotFusedError,
    number,
    require_kernels,
    require_no_overlap,
    require_plain_tensors,
    require_state,
    require_torchs_own_step,
    same_layout,
)
from .pending import PerDevice
from .steps import counts_on_device, lend_steps, new_step


@dataclass
class FusedStep:
    """One step of one optimizer; empty where no parameter has a gradient."""

    optimizer: torch.optim.Optimizer
    work: dict[torch.device, AdamTensors | SgdTensors]
    workspaces: dict[torch.device, dict[str, Any]]
    """What the kernels keep between steps."""
    other_copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Weights and copies of them that the kernels don't write."""

    def check(
        self, scale: Tensor | None, multipliers: Mapping[torch.device, Tensor], max_norm: float | None = None
    ) -> tuple[PerDevice, PerDevice, Tensor]:
        """Overflow flags and multipliers by device, and the norm of all gradients; see `check_grads`."""
        alone = len(self.work) == 1
        checks = {
            device: check_grads(
                tensors.grads,
                None if scale is None else scale.to(device, non_blocking=True),
                multipliers.get(device),
                max_norm if alone else None,
                self.workspaces[device],
            )
            for device, tensors in self.work.items()
        }
        first = next(iter(checks.values()))
        found_infs = {device: check.found_inf for device, check in checks.items()}
        factors = {device: check.multiplier for device, check in checks.items()}
        if alone or max_norm is None:
            return found_infs, factors, first.norm
        norm, shrink = clip_over_devices([check.norm for check in checks.values()], max_norm)
        return found_infs, {d: f * shrink.to(d, non_blocking=True) for d, f in factors.items()}, norm

    def run(self, multipliers: Mapping[torch.device, Tensor], found_infs: Iterable[Tensor]) -> None:
        """Update the weights, unless one of `found_infs` isn't 0; bring their copies up to date either way."""
        name = type(self.optimizer).__name__
        with torch.autograd.profiler.record_function(f"Optimizer.step#{name}.step"), torch.no_grad():
            found_inf = any_set(found_infs)
            for device, tensors in self.work.items():
                skip = None if found_inf is None else found_inf.to(device, non_blocking=True)
                update = sgd_ if isinstance(tensors, SgdTensors) else adam_
                update(tensors, multipliers.get(device), skip, self.workspaces[device])  # type: ignore[arg-type]
                written = [*tensors.params, *(copy for copy in tensors.copies if copy is not None)]
                torch.autograd.graph.increment_version(written)
            for param, copy in self.other_copies:
                copy.copy_(param)
            wrote(param for tensors in self.work.values() for param in tensors.params)
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]


def any_set(found_infs: Iterable[Tensor]) -> Tensor | None:
    """One flag that is not 0 where any of these isn't, on the device of the first; None if there are none."""
    flags = list(found_infs)
    if len(flags) <= 1:
        return flags[0] if flags else None
    return torch.stack([f.to(flags[0].device, non_blocking=True).reshape(()) for f in flags]).ne(0).any().float()


def clip_over_devices(norms: list[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm of gradients on several devices, and the factor that clips them; on the first device."""
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, non_blocking=True) for n in norms]))
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1)


def collect(optimizer: Any, workspaces: dict[torch.device, dict[str, Any]], only_grads: bool = False) -> FusedStep:
    """Gather what the fused step of `optimizer` works on; raises `NotFusedError` where it can't be taken.

    Creates the optimizer's state where it is missing, as its own step would. `only_grads` is enough for `check`.
    """
    require_torchs_own_step(optimizer)
    entries = [
        (param, param.grad, index)
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param.grad is not None
    ]
    for param, grad, _ in entries:
        require_plain_tensors(param, grad)
    # torch unscales float16 gradients only inside fused optimizers; elsewhere they are its error to raise.
    if not amp_aware(optimizer) and any(grad.dtype is torch.float16 for _, grad, _ in entries):
        raise NotFusedError("gradients are float16")
    devices = list(dict.fromkeys(param.device for param, _, _ in entries))
    require_kernels({device.type for device in devices})
    require_no_overlap([param for param, _, _ in entries])
    require_no_overlap([grad for _, grad, _ in entries])

    gather, kind, read = (
        (gather_sgd, SgdTensors, sgd_group)
        if isinstance(optimizer, torch.optim.SGD)
        else (gather_adam, AdamTensors, adam_group)
    )
    groups = [read(group) for group in optimizer.param_groups]
    for device in devices:
        workspaces.setdefault(device, {})
    counts_on_cpu = kind is AdamTensors and not all(map(counts_on_device, optimizer.param_groups))
    if counts_on_cpu and not only_grads and any(device.type != "cpu" for device in devices):
        lend_steps(optimizer)
    step = FusedStep(optimizer, {device: kind(groups) for device in devices}, workspaces)  # type: ignore[arg-type]
    for param, grad, index in entries:
        tensors = step.work[param.device]
        tensors.params.append(param)
        tensors.grads.append(grad)
        tensors.group_of.append(index)
        if only_grads:
            continue
        gather(tensors, optimizer.state, param, optimizer.param_groups[index])  # type: ignore[arg-type]
        copies = writable_copies(param)
        ours = next((copy for copy in copies if same_layout(copy, param)), None)
        tensors.copies.append(ours)
        step.other_copies += [(param, copy) for copy in copies if copy is not ours]
    return step


def amp_aware(optimizer: Any) -> bool:
    """Whether an optimizer unscales and skips by itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def learning_rate(value: float | Tensor) -> float | Tensor:
    """A learning rate as a number or, so that a captured graph sees it change, as a tensor on the GPU."""
    on_gpu = isinstance(value, Tensor) and value.is_cuda and not value.requires_grad
    return value if on_gpu else number(value)


def adam_group(group: Mapping[str, Any]) -> AdamGroup:
    """The settings of a parameter group of `torch.optim.Adam` or `AdamW`."""
    beta1, beta2 = group["betas"]
    return AdamGroup(
        learning_rate(group["lr"]),
        number(beta1),
        number(beta2),
        group["eps"],
        number(group["weight_decay"]),
        group["decoupled_weight_decay"],
        group["maximize"],
    )


def sgd_group(group: Mapping[str, Any]) -> SgdGroup:
    """The settings of a parameter group of `torch.optim.SGD`."""
    return SgdGroup(
        learning_rate(group["lr"]),
        group["momentum"],
        group["dampening"],
        group["nesterov"],
        number(group["weight_decay"]),
        group["maximize"],
    )


def gather_adam(tensors: AdamTensors, states: Any, param: Tensor, group: Mapping[str, Any]) -> None:
    """Add a parameter's state, created as torch does it if there is none."""
    state = states[param]
    if not state:
        state["step"] = new_step(param, group)
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
    step = state.get("step")
    if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.numel() != 1:
        raise NotFusedError("its step counts aren't float32 tensors")
    if step.device != param.device:
        step = state["step"] = step.to(param.device, non_blocking=True)
    tensors.steps.append(step)
    tensors.exp_avgs.append(require_state(state.get("exp_avg"), param))
    tensors.exp_avg_sqs.append(require_state(state.get("exp_avg_sq"), param))
    tensors.max_exp_avg_sqs.append(require_state(state.get("max_exp_avg_sq"), param) if group["amsgrad"] else None)


def gather_sgd(tensors: SgdTensors, states: Any, param: Tensor, group: Mapping[str, Any]) -> None:
    """Add a parameter's momentum, zeros if there is none: with them, the first step is as torch's."""
    assert param.grad is not None
    mixed = param.grad.dtype != param.dtype and not group["fused"]  # torch's fused step raises
    if mixed and group["weight_decay"] and group["maximize"]:
        raise NotFusedError(f"torch decays weights in {param.grad.dtype}, the gradients' type")
    if group["momentum"] == 0:
        tensors.momentum_buffers.append(None)
        return
    state = states[param]
    if state.get("momentum_buffer") is None:
        if group["dampening"] != 0:
            raise NotFusedError("a first step with dampening isn't like the others")
        if mixed and not group["weight_decay"]:
            raise NotFusedError(f"torch keeps momentum in {param.grad.dtype}, the gradients' type")
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    tensors.momentum_buffers.append(require_state(state["momentum_buffer"], param))
