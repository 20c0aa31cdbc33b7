"""A state-space model whose selective scan (arXiv 2312.00752) is plain PyTorch, as it is where no CUDA kernel is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def scan(decay: Tensor, added: Tensor) -> Tensor:
    """The states of h[t] = decay[t] · h[t - 1] + added[t] along dimension 1; all (batch, time, inner, state).

    Each round joins each step with what twice as many steps before it have left, as in Hillis and Steele's scan.
    """
    time, reach = added.shape[1], 1
    while reach < time:
        before = (0, 0, 0, 0, reach, 0)
        added = added + decay * F.pad(added[:, :-reach], before)
        decay = decay * F.pad(decay[:, :-reach], before)
        reach *= 2
    return added


class SelectiveBlock(nn.Module):
    """An RMS norm, a causal convolution of each channel, and a scan whose steps and gates depend on the input."""

    def __init__(self, width: int, state: int = 16, reach: int = 4) -> None:
        super().__init__()
        inner, rank = 2 * width, max(1, width // 16)
        self.sizes = [rank, state, state]
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, reach, groups=inner, padding=reach - 1)
        self.select = nn.Linear(inner, sum(self.sizes), bias=False)
        self.step = nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = F.silu(self.convolution(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rank, write, read = self.select(u).split(self.sizes, -1)
        step = F.softplus(self.step(rank))
        decay = torch.exp(step.unsqueeze(-1) * -self.log_decay.exp())
        states = scan(decay, (step * u).unsqueeze(-1) * write.unsqueeze(2))
        y = (states * read.unsqueeze(2)).sum(-1) + self.skip * u
        return x + self.out(y * F.silu(gate))


class StateSpace(nn.Module):
    """A language model of such blocks."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(SelectiveBlock(width) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, time, vocab), or with `targets` their mean cross-entropy in nats."""
        logits = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
