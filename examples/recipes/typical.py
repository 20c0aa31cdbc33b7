"""Typical mixed precision training."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class Typical(Recipe):
    """Typical mixed precision training."""

    def build(self) -> None:
        model = digits.classifier()
        self.modules = [model]
        self.loss = self.way(lambda x, y: F.cross_entropy(model(x), y))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler(init_scale=2.0**22)  # too large: the first steps are skipped

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(*digits.batch(self.random))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(Typical)
