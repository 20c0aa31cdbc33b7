"""Models in plain torch: recurrent ones, gradients of gradients, adapters, checkpoints, tied weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from proof.models.subject import Case, Inputs

WIDTH = 32


class Recurrent(nn.Module):
    """Two layers of a recurrent network, and a head."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cells, self.head = kind(16, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 16] to [N, T, 8]."""
        return self.head(self.cells(x)[0])


class Adapted(nn.Module):
    """A frozen linear layer, and two small matrices that are trained."""

    def __init__(self, inside: int, outside: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(inside, outside).requires_grad_(False)
        self.down, self.up = nn.Linear(inside, rank, bias=False), nn.Linear(rank, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inside] to [..., outside]."""
        return self.frozen(x) + 2 * self.up(self.down(x))


class Tied(nn.Module):
    """A language model of two blocks, checkpointed, whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """[N, T] to [N, T, 64]."""
        h = self.embedding(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


class Recommender(nn.Module):
    """Embeddings summed by bag, and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """[N, 8] numbers and [3, N, K] places to [N, 1]."""
        rows = [self.bottom(dense), *(bag(places) for bag, places in zip(self.bags, sparse, strict=True))]
        together = torch.stack(rows, 1)
        upper = torch.triu_indices(4, 4, offset=1)
        pairs = torch.bmm(together, together.mT)[:, upper[0], upper[1]]
        return self.top(torch.cat([rows[0], pairs], 1))


class Noisy(nn.Module):
    """The U of a diffusion model: down, attention, and up, with what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.attention = nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to the same."""
        early = nn.functional.silu(self.enter(x))
        low = nn.functional.silu(self.norm(self.down(early)))
        flat = low.flatten(2).transpose(1, 2)
        low = low + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).unflatten(2, low.shape[2:])
        return self.leave(torch.cat([early, self.up(low)], 1))


def perceptron(end: int, act: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    """[N, 8] to [N, end]."""
    return nn.Sequential(nn.Linear(8, WIDTH), act(), nn.Linear(WIDTH, WIDTH), act(), nn.Linear(WIDTH, end))


def penalty(run: Callable[..., Any], inputs: Inputs) -> Any:
    """A critic's value, and how far its gradient's length is from 1: the loss of a Wasserstein GAN's critic."""
    if not torch.is_grad_enabled():
        return run(inputs["x"])
    x = inputs["x"].requires_grad_()
    said = run(x)
    (slope,) = torch.autograd.grad(said.float().sum(), x, create_graph=True)
    return said, (slope.flatten(1).norm(dim=1) - 1).square().mean()


def laplacian(run: Callable[..., Any], inputs: Inputs) -> Any:
    """A field, its slope, and the trace of its second derivatives along two directions."""
    if not torch.is_grad_enabled():
        return run(inputs["x"])
    x = inputs["x"].requires_grad_()
    field = run(x)
    (slope,) = torch.autograd.grad(field.float().sum(), x, create_graph=True)
    return field, slope, sum(torch.autograd.grad(slope[:, n].sum(), x, create_graph=True)[0][:, n] for n in range(2))


def call_in_order(run: Callable[..., Any], inputs: Inputs) -> Any:
    """One call with the inputs in order."""
    return run(*inputs.values())


def _of(make: Callable[[], nn.Module], inputs: Callable[[], Inputs], call: Any = call_in_order) -> Case:
    return Case("plain torch", make, inputs, call)


def rows() -> Inputs:
    """[8, 8] numbers."""
    return {"x": torch.randn(8, 8)}


def critic() -> nn.Module:
    """Of pictures [N, 3, 8, 8]."""
    act = nn.LeakyReLU(0.2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), act, nn.Conv2d(8, 8, 4, 2, 1), act, nn.Flatten(), nn.Linear(128, 1)
    )


CASES = {
    "lstm": _of(lambda: Recurrent(nn.LSTM), lambda: {"x": torch.randn(4, 6, 16)}),
    "gru": _of(lambda: Recurrent(nn.GRU), lambda: {"x": torch.randn(4, 6, 16)}),
    "rnn": _of(lambda: Recurrent(nn.RNN), lambda: {"x": torch.randn(4, 6, 16)}),
    "wgan-gp": _of(critic, lambda: {"x": torch.randn(4, 3, 8, 8)}, penalty),
    "second derivatives": _of(lambda: perceptron(1), rows, laplacian),
    "mlp": _of(lambda: perceptron(4, nn.GELU), rows),
    "lora": _of(lambda: nn.Sequential(Adapted(8, WIDTH), nn.GELU(), Adapted(WIDTH, 4)), rows),
    "tied and checkpointed": _of(Tied, lambda: {"x": torch.randint(0, 64, (2, 8))}),
    "transformer": _of(
        lambda: nn.Transformer(WIDTH, 4, 2, 2, 48, 0.0, batch_first=True),
        lambda: {"source": torch.randn(2, 8, WIDTH), "target": torch.randn(2, 6, WIDTH)},
    ),
    "dlrm": _of(Recommender, lambda: {"dense": torch.randn(6, 8), "sparse": torch.randint(0, 50, (3, 6, 4))}),
    "unet": _of(Noisy, lambda: {"x": torch.randn(2, 3, 8, 8)}),
}
