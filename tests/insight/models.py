"""What the tests of the audit share: small models, one that overflows or underflows at a known place, and a loss."""

import torch
from torch import Tensor, nn

from tests.models import Net


def planted(factor: float) -> nn.Module:
    scaled = Net(lambda m, x: x * factor * factor)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), scaled), nn.Linear(8, 8))


def mean_square(y: Tensor) -> Tensor:
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()


def sensitive() -> nn.Module:
    """In it a module rounds its input badly: what is left is the difference of large numbers."""
    nn.init.ones_((wide := nn.Linear(8, 8)).weight)
    cancels = Net(lambda m, x: m.wide(x + 100) - 800, wide=wide)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(cancels, nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8))
