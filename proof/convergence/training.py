"""One training run of a subject: its losses, step by step."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import ampcompile
from proof.convergence.subjects import SUBJECTS
from proof.ops.calls import amp, eager, stock


def train(name: str, seed: int, how: str, low: torch.dtype = torch.bfloat16, shake: int | None = None) -> list[float]:
    """Of each step. `how`: float32, eager autocast, amp, stock (torch's compilers under autocast) or 16-bit weights.

    The same seed gives the same initial weights and batches. `shake` multiplies each initial weight by a random number
    between 1 - 2**-9 and 1 + 2**-9: as far as rounding to bfloat16 moves it.
    """
    subject = SUBJECTS[name]
    torch.manual_seed(seed)
    model: Any = subject.model()
    batches = subject.batches(torch.Generator().manual_seed(seed))
    if shake is not None:
        shake_weights(model, torch.Generator().manual_seed(1000 + shake))
    if how == "16-bit weights":
        model.to(low)
        batches = [tuple(_in(low, part) for part in batch) for batch in batches]  # type: ignore[misc]
    torch._dynamo.reset()
    ways = {"amp": amp(dtype=low, lower=subject.lower), "stock": stock(subject.lower)}
    run = ways.get(how, eager)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=subject.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    scaled = low is torch.float16 and how in ("eager autocast", "amp", "stock")
    kind: Any = ampcompile.GradScaler if how == "amp" else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=2.0**10, growth_interval=50, enabled=scaled)
    found = []
    for inputs, targets in batches:
        with torch.autocast("cpu", low) if how in ("eager autocast", "stock") else nullcontext():
            loss = run(inputs, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        found.append(loss.item())
    if how == "amp":
        copies = ampcompile.weight_stats().copies
        assert copies > 0, "no weight was used in 16 bits"
    return found


def shake_weights(model: nn.Module, draw: torch.Generator) -> None:
    """Move each weight a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-9 * (2 * torch.rand(parameter.shape, generator=draw) - 1))


def _in(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value
