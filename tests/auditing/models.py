"""What the tests of the audit share: small models, one that overflows or underflows at a known place, and a loss."""

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * self.factor


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def planted(factor: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Scaled(factor)), nn.Linear(8, 8))


def mean_square(y: Tensor) -> Tensor:
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()
