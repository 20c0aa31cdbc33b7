"""Gradients are unscaled, looked at and clipped before the step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class Clipping(Recipe):
    """Working with unscaled gradients: clipping."""

    def build(self) -> None:
        self.model = digits.classifier()
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scaler = self.way.scaler(init_scale=2.0**20)

    def step(self) -> Tensor:
        pictures, answers = digits.batch(self.random)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(pictures).float(), answers)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(Clipping)
