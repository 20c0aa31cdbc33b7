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


class Cancels(nn.Module):
    """Rounds its input badly: what is left is the difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)
        nn.init.ones_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x + 100) - 800


def sensitive() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(Cancels(), nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8))
