"""Lightning Fabric: `setup` takes the compiled model; `precision="bf16-mixed"` says the type, a plugin the scaler.

python -m examples.ecosystem.fabric_loop
"""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import ampcompile
from examples.recipes import digits


def train(
    way: str, steps: int = 12, precision: Any = "bf16-mixed", plugins: Any = (), **options: Any
) -> tuple[lightning.Fabric, nn.Module, float]:
    """Fabric, the model it set up after some steps, and the last loss; `plugins` instead of `precision`."""
    torch.manual_seed(0)
    if plugins or way == "float32":
        precision = None
    fabric = lightning.Fabric(accelerator="cpu", precision=precision, plugins=plugins)
    model = digits.classifier()
    optim: Any = ampcompile.optim if way == "amp" else torch.optim
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = torch.compile(model, backend="amp", options=options) if way == "amp" else model
    model, optimizer = fabric.setup(compiled, optimizer)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pictures, answers = digits.batch(random)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures), answers)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
    return fabric, model, loss.item()


if __name__ == "__main__":
    for way in ("autocast", "amp"):
        print(f"{way:8}  loss after 12 steps {train(way)[2]:.4f}")
