"""After each step the model is tried on unseen pictures, in eval mode, and training goes on."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class Validation(Recipe):
    """Validation inside training."""

    def build(self) -> None:
        self.model = digits.classifier(nn.BatchNorm1d(64))
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()
        self.validation_losses: list[float] = []

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        self.model.train()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(pictures).float(), answers)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.eval()
        pictures, answers = digits.unseen()
        with torch.no_grad():
            self.validation_losses.append(F.cross_entropy(self.run(pictures).float(), answers).item())
        return loss


if __name__ == "__main__":
    compare(Validation)
