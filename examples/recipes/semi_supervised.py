"""The model labels pictures without gradients and learns from others with gradients, in one step."""

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class SemiSupervised(Recipe):
    """Semi-supervised learning: pseudo-labels under no_grad and a gradient pass in one step."""

    def build(self) -> None:
        self.model = digits.classifier()
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random, size=32)
        unlabelled, _ = digits.batch(self.random, size=32)
        with torch.no_grad():
            guesses = self.run(unlabelled).float().softmax(-1)
        noisy = unlabelled + 0.1 * torch.randn(unlabelled.shape, generator=self.random)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(pictures).float(), answers)
        loss = loss + 0.5 * F.cross_entropy(self.run(noisy).float(), guesses)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(SemiSupervised)
