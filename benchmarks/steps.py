"""The two things users do with a model: call it, or take a training step with it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import ampcompile
from benchmarks.works import Steps

Around = Callable[[], AbstractContextManager]


def inference(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], around: Around) -> Callable[[], Tensor]:
    """One call without gradients."""

    def call() -> Tensor:
        with torch.no_grad(), around():
            return run(*inputs)

    return call


class TrainingStep:
    """Forward, backward and update on the same batch at every call; AdamW with torch's fused kernels.

    With our own scaler where `ours`: it takes the step also if the loss isn't scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        around: Around,
        steps: Steps,
        ours: bool,
    ) -> None:
        self.model, self.run, self.inputs, self.around, self.steps = model, run, inputs, around, steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        scaler: Any = ampcompile.GradScaler if ours else torch.amp.GradScaler
        self.scaler = scaler(inputs[0].device.type, enabled=steps.scaler)
        self.losses: list[Tensor] = []

    def __call__(self) -> Tensor:
        for _ in range(self.steps.accumulate):
            with self.around():
                loss = self.run(*self.inputs) / self.steps.accumulate
            self.scaler.scale(loss).backward()
        if self.steps.clip:
            self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        return loss

    def _clip(self) -> None:
        if isinstance(self.scaler, ampcompile.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def history(self) -> list[float]:
        """Loss of each step so far."""
        return [loss.item() * self.steps.accumulate for loss in self.losses]
