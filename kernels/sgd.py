"""SGD over all parameters at once, with unscaling, clipping, skipping and the weights' copies folded in."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from .step import StepTensors


class SgdGroup(NamedTuple):
    """The settings of a parameter group; those of `torch.optim.SGD`."""

    lr: float | Tensor
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool


@dataclass
class SgdTensors(StepTensors):
    """The tensors of a step of SGD."""

    NAME = "sgd"
    STATES: ClassVar[dict[str, str]] = {"momentum_buffers": "momentum_buffer"}
    OPTIONAL = "momentum_buffers", "momentum"
    OF_CODED = ("steps",)
    momentum_buffers: list[Tensor | None] = field(
        default_factory=list
    )  # float32, zeros before the first step; or coded
    steps: list[Tensor | None] = field(default_factory=list)  # 0-dim

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = self.steps or [None] * len(self.params)


def sgd_(
    tensors: SgdTensors,
    multiplier: Tensor | None = None,
    found_inf: Tensor | None = None,
    workspace: dict[str, Any] | None = None,
) -> None:
    """Take one step of SGD in place, on gradients multiplied by `multiplier`; no host sync, gradients are only read.

    If `found_inf` isn't 0 nothing changes; copies are cast from the weights either way. Both are one float32
    element on the tensors' device, or None. `workspace` keeps a GPU's buffers between calls. Moves 12 bytes a
    parameter with float32 gradients, 8 more for momentum, 2 more for a copy; as many for a 16-bit parameter with a
    remainder, 10 with one of 8 bits, 8 with a random key, 16 with a master. On a GPU 3 more to quantize it, 7 if its
    scale changes.
    """
    tensors.take_step(multiplier, found_inf, workspace)
