"""Models so small that a step is mostly the host's work: what is updated of each, and how it is called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE = 1e-5
"""Learning rate: weights change at every step, but losses and gradients stay what they are in some thousand steps."""
Compile = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Small:
    """A model, ready to run."""

    updates: tuple[tuple[torch.optim.Optimizer, Callable[[], Tensor]], ...]
    """The updates of a training step in turn: an optimizer, and the loss that it makes smaller."""
    call: Callable[[], Tensor]
    """A call for its result alone."""


def mlp(compiled: Compile) -> Small:
    """Three linears of 64 features; batch 32."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    run, x = compiled(model), torch.randn(32, 64)
    return Small(((_adam(model), lambda: run(x).float().square().mean()),), lambda: run(x))


def quickstart(compiled: Compile) -> Small:
    """The model of the README's Quickstart, with its batch, loss and optimizer."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 10))
    run, x, y = compiled(model), torch.randn(64, 256), torch.randint(10, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return Small(((optimizer, lambda: F.cross_entropy(run(x), y)),), lambda: run(x))


class Actor(nn.Module):
    """Mean and logarithm of the deviation of 6 actions, for 17 observations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(17, 256), nn.Linear(256, 256)
        self.mean, self.deviation = nn.Linear(256, 6), nn.Linear(256, 6)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        h = self.second(self.first(seen).relu()).relu()
        return self.mean(h), self.deviation(h).tanh()


class Critics(nn.Module):
    """Two values of an action."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(23, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
            for _ in range(2)
        )

    def forward(self, seen: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([seen, action], 1)
        return self.first(x), self.second(x)


def sac(compiled: Compile) -> Small:
    """Soft actor-critic: an actor and two critics of 256 features, each compiled; batch 256. The critics' update, then
    the actor's, whose gradient goes through the critics. The call is what a target begins with: action and value.
    """
    actor, critics = Actor(), Critics()
    act, judge = compiled(actor), compiled(critics)
    seen, action, target, noise = (torch.randn(256, width) for width in (17, 6, 1, 6))

    def critics_loss() -> Tensor:
        return sum((F.mse_loss(value.float(), target) for value in judge(seen, action)), torch.zeros(()))

    def actor_loss() -> Tensor:
        mean, deviation = (value.float() for value in act(seen))
        sample = mean + deviation.exp() * noise
        likelihood = -deviation - torch.log1p(1e-6 - sample.tanh().square())
        return (0.2 * likelihood.sum(1, keepdim=True) - torch.minimum(*judge(seen, sample.tanh()))).mean()

    def call() -> Tensor:
        return torch.minimum(*judge(seen, act(seen)[0].tanh()))

    return Small(((_adam(critics), critics_loss), (_adam(actor), actor_loss)), call)


def lenet(compiled: Compile) -> Small:
    """LeNet-5 with ReLU and max pooling, images of 28 x 28; batch 32."""
    convolutions = (nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU())
    linears = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *linears)
    run, x, y = compiled(model), torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    return Small(((_adam(model), lambda: F.cross_entropy(run(x), y)),), lambda: run(x))


class Recurrent(nn.Module):
    """A cell run once for each place of a sequence, by a loop in Python, and a linear at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(64, 64), nn.Linear(64, 8)

    def forward(self, sequence: Tensor) -> Tensor:
        h = sequence.new_zeros(sequence.shape[1], 64)
        for x in sequence:
            h = self.cell(x, h)
        return self.last(h)


def gru(compiled: Compile) -> Small:
    """A GRU cell of 64 features over 16 places, compiled whole; batch 32."""
    model = Recurrent()
    run, x = compiled(model), torch.randn(16, 32, 64)
    return Small(((_adam(model), lambda: run(x).float().square().mean()),), lambda: run(x))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=RATE)


MODELS: Mapping[str, Callable[[Compile], Small]] = {
    "MLP 3x64": mlp,
    "Quickstart": quickstart,
    "SAC": sac,
    "LeNet": lenet,
    "GRU cell, 16 times": gru,
}
