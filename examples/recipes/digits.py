"""Handwritten digits, 8 by 8, from scikit-learn: 1797 of them."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@cache
def images() -> tuple[Tensor, Tensor]:
    """All pictures, float32 (1797, 64) in [0, 1], and their digits, int64 (1797,)."""
    bunch = load_digits()
    return torch.from_numpy(bunch.data).float() / 16, torch.from_numpy(bunch.target).long()


def batch(random: torch.Generator, size: int = 64) -> tuple[Tensor, Tensor]:
    """Random pictures and their digits."""
    pictures, digits = images()
    chosen = torch.randint(1200, (size,), generator=random)
    return pictures[chosen], digits[chosen]


def unseen() -> tuple[Tensor, Tensor]:
    """The pictures that no batch holds."""
    pictures, digits = images()
    return pictures[1200:], digits[1200:]


def classifier(*extra: nn.Module) -> nn.Sequential:
    """A small network with a norm, and `extra` layers on its 64 features."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), *extra, nn.Linear(64, 10))
