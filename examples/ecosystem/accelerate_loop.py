"""Hugging Face Accelerate: a plugin has `prepare` compile the model with amp; the optimizer is ours.

Gradients are accumulated over two batches; `mixed_precision="bf16"` says the type, as it does without compilation.

python -m examples.ecosystem.accelerate_loop
"""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ampcompile
from ampcompile.integrations.accelerate import AmpPlugin
from examples.recipes import digits


def train(way: str, steps: int = 12, **plugin: Any) -> tuple[Accelerator, nn.Module, float]:
    """The accelerator, the model it prepared after some steps, and the last loss."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if way == "float32" else "bf16",
        gradient_accumulation_steps=2,
        dynamo_plugin=AmpPlugin(**plugin) if way == "amp" else None,
    )
    model = digits.classifier()
    optim: Any = ampcompile.optim if way == "amp" else torch.optim
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    random = torch.Generator().manual_seed(0)
    for _ in range(2 * steps):
        pictures, answers = digits.batch(random)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(pictures), answers)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model, loss.item()


if __name__ == "__main__":
    for way in ("autocast", "amp"):
        print(f"{way:8}  loss after 12 steps {train(way)[2]:.4f}")
