"""Hugging Face Accelerate: compile with `model.compile(backend="amp")`, then `prepare`.

`Accelerator(dynamo_backend="amp")` can't work: Accelerate's backends are an enumeration that doesn't know others. With
mixed_precision="bf16" or without: the numbers are the same, since an autocast region around the call is what the
compiled model opens itself.

python -m examples.ecosystem.accelerate_loop
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from examples.recipes import digits


def train(compiled: bool, lower: str = "inductor", steps: int = 12, precision: str = "bf16") -> tuple[nn.Module, float]:
    """A classifier of digits after some steps, and its last loss."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = digits.classifier()
    if compiled:
        model.compile(backend="amp", options={"lower": lower})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pictures, answers = digits.batch(random)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures).float(), answers)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return accelerator.unwrap_model(model), loss.item()


if __name__ == "__main__":
    for compiled in (False, True):
        print(f"{'amp' if compiled else 'eager autocast':14}  loss after 12 steps {train(compiled)[1]:.4f}")
