"""What the fused step knows of torch's optimizers: their settings and state, and where Adam's step counts are.

Torch keeps these on the CPU unless the optimizer is `fused` or `capturable`. The fused step needs them on the GPU,
which decides whether a step counts. They are moved back before torch's own step or `state_dict()` reads them: in one
copy, for which the host waits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.errors import OptimizerError
from ampcompile.kernels import tables
from ampcompile.kernels.adam import AdamGroup, AdamTensors
from ampcompile.kernels.sgd import SgdGroup, SgdTensors
from ampcompile.torch_private import marks, storages

from .conditions import NotFusedError, require_state

Group = Mapping[str, Any]


class Family(NamedTuple):
    """The differences between kinds of optimizers."""

    tensors: type[AdamTensors] | type[SgdTensors]
    read: Callable[[Group], Any]
    """The settings of a parameter group as the kernel takes them, `AdamGroup` or `SgdGroup`"""
    kind: tuple[str, ...]
    """The settings that decide, if they are 0 or not, whether a step is fused, and which states it has"""
    prepare: Callable[[Any, Tensor, Group], None]
    """Makes a parameter's state as torch does, if there is none, and checks it"""


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


def _prepare_adam(states: Any, param: Tensor, group: Group) -> None:
    state, moments = states[param], ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
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


ADAM = Family(AdamTensors, _read_adam, ("amsgrad", "fused", "capturable", "differentiable"), _prepare_adam)
SGD = Family(
    SgdTensors,
    lambda group: SgdGroup(*[group[name] for name in SgdGroup._fields]),
    ("momentum", "weight_decay", "maximize", "fused", "differentiable"),
    _prepare_sgd,
)
