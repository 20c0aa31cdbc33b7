"""Two networks against each other: each learns while the other's weights stay as they are."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class Gan(Recipe):
    """A GAN step."""

    def build(self) -> None:
        self.painter = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.modules = [self.painter, self.critic]
        self.paint, self.judge = self.way(self.painter), self.way(self.critic)
        self.optimizers = [self.way.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in self.modules]
        self.scaler = self.way.scaler()

    def update(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """One optimizer's step, on gradients that nothing else reached."""
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)

    def step(self) -> Tensor:
        real, _ = digits.batch(self.random)
        painted = self.paint(torch.randn(len(real), 16, generator=self.random))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of_real, of_painted = self.judge(real).float(), self.judge(painted.detach()).float()
        judged = F.binary_cross_entropy_with_logits
        self.update(judged(of_real, ones) + judged(of_painted, zeros), self.optimizers[1])
        loss = judged(self.judge(painted).float(), ones)
        self.update(loss, self.optimizers[0])
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(Gan)
