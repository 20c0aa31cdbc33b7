"""Text is learned, and written byte by byte between the steps with the weights as they are then."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import stdlib_text
from examples.recipes.recipe import Recipe, compare

LENGTH = 16


@cache
def _text() -> Tensor:
    return stdlib_text.read(limit=200_000)[0]


class Decoding(Recipe):
    """Iterative decoding between training steps."""

    def build(self) -> None:
        self.model = nn.Sequential(
            nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * LENGTH, 64), nn.GELU(), nn.Linear(64, 256)
        )
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.scaler = self.way.scaler()
        self.written: list[int] = []

    def step(self) -> Tensor:
        passages, following = stdlib_text.batch(_text(), 32, LENGTH, self.random)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(passages).float(), following[:, -1])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.write(passages[:1])
        return loss

    @torch.no_grad()
    def write(self, window: Tensor, count: int = 4) -> None:
        """Continue a passage greedily."""
        for _ in range(count):
            following = self.run(window).float().argmax(-1, keepdim=True)
            window = torch.cat([window[:, 1:], following], dim=1)
        self.written += window[0, -count:].tolist()


if __name__ == "__main__":
    compare(Decoding)
