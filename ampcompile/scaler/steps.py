"""Adam's step counts, which torch keeps on the CPU unless the optimizer is `fused` or `capturable`.

The fused step needs them on the GPU, which decides whether a step counts. They are moved back before torch's own step
or `state_dict()` reads them: in one copy, for which the host waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.kernels.triton import tables
from ampcompile.torch_private import dynamo_marks, optimizers


def new_step(param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A step count of zero, with the dtype and device that torch would choose."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    device = param.device if counts_on_device(group) else "cpu"
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Return True if torch keeps the step counts of a parameter group on its parameters' device."""
    return bool(group["fused"] or group["capturable"])


def require_counts(optimizer: torch.optim.Optimizer, devices: Collection[torch.device], own_step: bool = True) -> None:
    """Allow counts that torch keeps on the CPU to be on these devices; raise ScalerError in a CUDA graph capture.

    Once they are moved back, replays would go on counting in the tensors on the GPU. `own_step`: the optimizer's step
    is torch's, and has to find them on the CPU.
    """
    if all(map(counts_on_device, optimizer.param_groups)) or all(device.type == "cpu" for device in devices):
        return
    if any(map(tables.capturing, devices)):
        raise ScalerError(
            f"found a CUDA graph capture of a step of {type(optimizer).__name__} that counts its steps on the CPU, "
            "expected one that counts on the GPU: make the optimizer with capturable=True or fused=True"
        )
    if own_step:
        lend_steps(optimizer)


def lend_steps(optimizer: torch.optim.Optimizer) -> None:
    """Register hooks that move the counts back before they are read; the fused step may then move them to the GPU."""
    if return_steps not in optimizers.pre_hooks(optimizer):
        optimizer.register_step_pre_hook(return_steps)
        optimizer.register_state_dict_pre_hook(return_steps)


@dynamo_marks.run_untraced
def return_steps(optimizer: Any, *_: Any) -> None:
    """Move all counts, if the optimizer has some, back to the device where torch keeps them."""
    if isinstance(optimizer, torch.optim.SGD):
        return
    params = [p for group in optimizer.param_groups if not counts_on_device(group) for p in group["params"]]
    states = [state for param in params if (state := optimizer.state.get(param)) and not state["step"].is_cpu]
    for device in {state["step"].device for state in states}:
        on_device = [state for state in states if state["step"].device == device]
        counts = torch.stack([state["step"].reshape(()) for state in on_device]).cpu()
        for state, count in zip(on_device, counts.unbind(), strict=True):
            state["step"] = count.clone()
