"""Small models that tests of several rooms are made of: any function as a module's forward, and a few common blocks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A module whose forward is `run(self, ...)`, with these parts: layers, parameters, buffers, or other values."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def weight(*shape: int, **how: bool) -> nn.Parameter:
    """Of a normal distribution."""
    return nn.Parameter(torch.randn(shape), **how)


class Block(nn.Module):
    """A norm, two linear layers and a residual connection; twice as wide inside, unless that is said."""

    def __init__(self, width: int = 8, inner: int = 0, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        inner = inner or 2 * width
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Attention(nn.Module):
    """Of heads of 8 numbers; `causal` as in a language model."""

    def __init__(self, width: int = 16, heads: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
