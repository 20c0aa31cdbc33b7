"""A loss that holds the norm of its own gradient: double backward through the compiled model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class GradientPenalty(Recipe):
    """Gradient penalty."""

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.scaler = self.way.scaler(init_scale=2.0**10)

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(pictures).float(), answers)
        scaled = torch.autograd.grad(self.scaler.scale(loss), [*self.model.parameters()], create_graph=True)
        gradients = [gradient / self.scaler.get_scale() for gradient in scaled]
        total = loss + 0.1 * torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        self.scaler.scale(total).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total


if __name__ == "__main__":
    compare(GradientPenalty)
