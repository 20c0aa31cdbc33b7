"""One step for several batches: gradients stay scaled, by one scale, until all are in."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare

BATCHES = 3


class Accumulation(Recipe):
    """Gradient accumulation."""

    def build(self) -> None:
        model = digits.classifier()
        self.modules = [model]
        self.loss = self.way(lambda x, y: F.cross_entropy(model(x), y) / BATCHES)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(BATCHES):
            loss = self.loss(*digits.batch(self.random, size=32))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total


if __name__ == "__main__":
    compare(Accumulation)
