"""Adam and AdamW over all parameters at once, with unscaling, clipping, skipping and the weights' copies folded in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import native


@dataclass(frozen=True)
class AdamGroup:
    """The settings of a parameter group; those of `torch.optim.Adam`."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool


@dataclass
class AdamTensors:
    """Lists with one entry per parameter, all tensors on one device; entries of a parameter share its strides.

    State is float32, in the layout of `torch.optim.Adam`.
    """

    groups: Sequence[AdamGroup]
    params: list[Tensor] = field(default_factory=list)
    """float32"""
    grads: list[Tensor] = field(default_factory=list)
    """float32, float16 or bfloat16"""
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor | None] = field(default_factory=list)
    """None where a group has no amsgrad"""
    steps: list[Tensor] = field(default_factory=list)
    """0-dim"""
    copies: list[Tensor | None] = field(default_factory=list)
    """float16 or bfloat16, written with the new weight; None where there is none"""
    group_of: list[int] = field(default_factory=list)


def adam_(
    tensors: AdamTensors,
    multiplier: Tensor | None = None,
    found_inf: Tensor | None = None,
    workspace: dict[str, Any] | None = None,
) -> None:
    """One step of Adam in place, on gradients multiplied by `multiplier`; no host sync, gradients stay as they are.

    Where `found_inf` isn't 0 nothing changes, step counts included; copies are cast from the weights either way.
    Both are one float32 element on the tensors' device, or None. `workspace` keeps a GPU's buffers between calls.
    Moves 28 bytes a parameter with float32 gradients, 8 more for amsgrad, 2 more for a copy.
    """
    t = tensors
    rows = (t.grads, t.params, t.exp_avgs, t.exp_avg_sqs, t.max_exp_avg_sqs, t.steps, t.copies)
    settings = native.group_values(t.groups)
    if t.params[0].is_cuda:
        from .triton import adam as gpu

        lrs = [group.lr for group in t.groups]
        workspace = {} if workspace is None else workspace
        gpu.adam_(rows, t.group_of, settings, lrs, multiplier, found_inf, workspace)
    else:
        native.step("adam", rows, t.group_of, settings, multiplier, found_inf)


def adam_reference_(tensors: AdamTensors, multiplier: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """The same in plain torch."""
    t = tensors
    device = t.params[0].device
    skip = torch.zeros((), device=device) if found_inf is None else found_inf.reshape(())
    factor = torch.ones((), device=device) if multiplier is None else multiplier.reshape(())

    def write(to: Tensor, value: Tensor) -> Tensor:
        to.copy_(torch.where(skip != 0, to, value))
        return to

    for i, (param, group) in enumerate(zip(t.params, (t.groups[g] for g in t.group_of), strict=True)):
        step = t.steps[i].double() + 1
        grad = t.grads[i].float() * (-factor if group.maximize else factor)
        value = param * (1 - group.lr * group.weight_decay) if group.decoupled_weight_decay else param
        if not group.decoupled_weight_decay and group.weight_decay != 0:
            grad = grad + group.weight_decay * param
        mean = t.exp_avgs[i].lerp(grad, 1 - group.beta1)
        square = t.exp_avg_sqs[i] * group.beta2 + (1 - group.beta2) * grad * grad
        peak = t.max_exp_avg_sqs[i]
        largest = square if peak is None else torch.maximum(peak, square)
        root_correction = (1 - group.beta2**step).sqrt().float()
        step_size = (group.lr / (1 - group.beta1**step)).float()
        value = value - step_size * mean / (largest.sqrt() / root_correction + group.eps)
        write(t.steps[i], step.float())
        write(t.exp_avgs[i], mean)
        write(t.exp_avg_sqs[i], square)
        if peak is not None:
            write(peak, largest)
        write(param, value)
        copy = t.copies[i]
        if copy is not None:
            copy.copy_(param)
