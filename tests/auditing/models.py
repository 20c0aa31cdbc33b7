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


class Centred(nn.Module):
    """What is left of a softmax without its mean is small beside its rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x * 0.01).softmax(-1) - 1 / 8


class Heads(nn.Module):
    """Two that need float32 in one op, and one with that op that doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide, self.plain = Centred(), Centred(), nn.Linear(8, 8), nn.Softmax(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.first(x), self.second(x), self.plain(self.wide(x))
