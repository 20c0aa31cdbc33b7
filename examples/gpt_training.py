"""One training loop, the same for every way of running the model."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampcompile
from benchmarks.models import GPT, GPT_13M
from examples import stdlib_text

WAYS = ("eager fp32", "eager autocast", "Inductor + autocast", "amp")
BATCH = 8
WARM_UP = 40


def low_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device computes in it, else float16."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


class Training:
    """A GPT with its optimizer, learning to continue the standard library's source."""

    def __init__(self, way: str, device: str, steps: int) -> None:
        torch.manual_seed(0)
        self.device, self.way, self.steps, self.steps_done = device, way, steps, 0
        self.train_text, self.validation_text = stdlib_text.read()
        self.random = torch.Generator().manual_seed(0)
        self.model = GPT(GPT_13M).to(device)
        self.run = self.compiled()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        schedule = lambda step: min((step + 1) / WARM_UP, 1 - 0.9 * step / self.steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        scaled = way != "eager fp32" and low_dtype(device) is torch.float16
        scaler = ampcompile.GradScaler if way == "amp" else torch.amp.GradScaler
        self.scaler = scaler(device, enabled=scaled)

    def compiled(self) -> Callable[..., Tensor]:
        if self.way == "amp":
            options: dict[str, Any] = {"dtype": low_dtype(self.device)}
            return torch.compile(self.model, backend="amp", options=options)
        return torch.compile(self.model) if self.way.startswith("Inductor") else self.model

    def batch(self, text: Tensor, size: int = BATCH) -> tuple[Tensor, Tensor]:
        """Random passages of `text`, and what follows each of their bytes."""
        tokens, targets = stdlib_text.batch(text, size, GPT_13M.context, self.random)
        return tokens.to(self.device), targets.to(self.device)

    def loss(self) -> Tensor:
        """Mean cross-entropy, in nats a byte, on one batch."""
        by_hand = self.way.endswith("autocast")
        with torch.autocast(self.device, low_dtype(self.device)) if by_hand else nullcontext():
            return self.run(*self.batch(self.train_text))

    def step(self) -> float:
        """Loss of one batch, after one update of the weights with it."""
        loss = self.loss()
        self.scaler.scale(loss).backward()
        if isinstance(self.scaler, ampcompile.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.steps_done += 1
        return loss.item()

    @torch.inference_mode()
    def validation_loss(self, passages: int = 64) -> float:
        """Mean cross-entropy on files that no batch came from."""
        total = 0.0
        for _ in range(passages):
            tokens, targets = self.batch(self.validation_text, size=1)
            total += F.cross_entropy(self.run(tokens).float().flatten(0, 1), targets.flatten()).item()
        return total / passages
