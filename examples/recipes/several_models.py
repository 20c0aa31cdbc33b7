"""Two models, two losses that use both, two optimizers, one scaler."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class SeveralModels(Recipe):
    """Several models, losses and optimizers, with retain_graph."""

    def build(self) -> None:
        self.modules = [digits.classifier(), digits.classifier()]
        self.first, self.second = map(self.way, self.modules)
        self.optimizers = [
            torch.optim.SGD(self.modules[0].parameters(), lr=0.02, momentum=0.9),
            torch.optim.AdamW(self.modules[1].parameters(), lr=1e-3),
        ]
        self.scaler = self.way.scaler()

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        one, two = self.first(pictures).float(), self.second(pictures).float()
        loss = F.cross_entropy(one + two, answers)
        other_loss = F.cross_entropy(2 * one - 0.5 * two, answers)
        self.scaler.scale(loss).backward(retain_graph=True)
        self.scaler.scale(other_loss).backward()
        self.scaler.unscale_(self.optimizers[0])  # of one alone, if one wants
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss + other_loss


if __name__ == "__main__":
    compare(SeveralModels)
