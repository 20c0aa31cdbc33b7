"""Parts that stay in float32: a function from elsewhere in a disabled region, and what ampcompile.keep_fp32 wraps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampcompile
from examples.recipes import digits
from examples.recipes.recipe import Recipe, Way, compare


def pairwise(features: Tensor) -> Tensor:
    """Stands for an imported function that doesn't know mixed precision: squares that overflow float16."""
    return torch.cdist(100 * features, 100 * features).square().mean()


class Head(nn.Linear):
    """The last layer, in float32."""


class Model(nn.Module):
    """Features, a penalty on them by the imported function, and logits."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.body, head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), Head(64, 10)
        self.head = ampcompile.keep_fp32(head) if way.compiled else head

    def forward(self, pictures: Tensor, answers: Tensor) -> Tensor:
        features = self.body(pictures)
        with torch.autocast("cpu", enabled=False):
            penalty = pairwise(features.float())
            logits = self.head(features.float())  # what keep_fp32 does by itself; eager autocast must be told
        return F.cross_entropy(logits, answers) + 1e-6 * penalty


class ForcedFp32(Recipe):
    """A disabled region around an imported function, and forced float32."""

    def build(self) -> None:
        model = Model(self.way)
        self.modules = [model]
        self.loss = self.way(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = self.way.scaler()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(*digits.batch(self.random))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(ForcedFp32)
