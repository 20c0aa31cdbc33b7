"""`with torch.autocast(...)` around the whole training loop, backward and steps included.

Users are told to leave backward and the optimizer outside. The compiled model gives the numbers it always gives; the
eager twin keeps to the advice, for its cache of casts would hand out old weights.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.recipes import digits
from examples.recipes.recipe import Recipe, compare


class OuterAutocast(Recipe):
    """Autocast opened once around the training loop."""

    def build(self) -> None:
        self.model = digits.classifier()
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()
        self.loop = self.train_one_epoch()

    def train_one_epoch(self) -> Iterator[Tensor]:
        """Steps without end; each is taken when the next loss is asked for."""
        while True:
            pictures, answers = digits.batch(self.random)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.run(pictures).float(), answers)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            yield loss

    def step(self) -> Tensor:
        with torch.autocast("cpu", self.way.dtype) if self.way.compiled else nullcontext():
            losses = [next(self.loop) for _ in range(2)]  # one region, several steps
        return losses[-1]


if __name__ == "__main__":
    compare(OuterAutocast)
