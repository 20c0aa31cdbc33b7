"""Adam and AdamW over all parameters at once, with unscaling, clipping, skipping and the weights' copies folded in."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from .step import StepTensors


class AdamGroup(NamedTuple):
    """The settings of a parameter group; those of `torch.optim.Adam`."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool


@dataclass
class AdamTensors(StepTensors):
    """The tensors of a step of Adam. State is float32, in the layout of `torch.optim.Adam`, or coded."""

    NAME = "adam"
    STATES: ClassVar[dict[str, str]] = {
        "exp_avgs": "exp_avg",
        "exp_avg_sqs": "exp_avg_sq",
        "max_exp_avg_sqs": "max_exp_avg_sq",
        "steps": "step",
    }
    OPTIONAL = "max_exp_avg_sqs", "amsgrad"
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor | None] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)  # 0-dim


def adam_(
    tensors: AdamTensors,
    multiplier: Tensor | None = None,
    found_inf: Tensor | None = None,
    workspace: dict[str, Any] | None = None,
) -> None:
    """Take one step of Adam in place, on gradients multiplied by `multiplier`; no host sync, gradients are only read.

    If `found_inf` isn't 0 nothing changes, step counts included; copies are cast from the weights either way.
    Both are one float32 element on the tensors' device, or None. `workspace` keeps a GPU's buffers between calls.
    Moves 28 bytes a parameter with float32 gradients, 8 more for amsgrad, 2 more for a copy; as many for a 16-bit
    parameter with a remainder, 26 with one of 8 bits, 24 with a random key, 32 with a master. On a GPU 3 more to
    quantize it, 7 if its scale changes.
    """
    tensors.take_step(multiplier, found_inf, workspace)
