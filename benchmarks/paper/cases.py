"""The counted cases: models at the sizes that people train, and their inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompile.dtypes import FP8
from benchmarks.architectures import TINY, build

STOCK, CONVERTED, AMP = "Inductor + autocast", "Inductor, converted", "amp"
PEERS = (STOCK, CONVERTED, AMP)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    AMP: {},
    f"{AMP}, every call": {"weights": "every_call"},
    f"{AMP}, relaxed": {"numerics": "relaxed"},
    f"{AMP}, saved in 8 bits": {"saved": "fp8"},
}
"""Peers that are amp with some option."""
QUANTIZED = {f"{AMP}, {recipe}": {"policy": f"op linear={recipe}"} for recipe in FP8}
TORCHAO = "torchao float8"
FP8_PEERS = (TORCHAO, STOCK, AMP, *QUANTIZED)
"""Peers of the cases in fp8, and of no others; torchao, if it is installed, by its recipe "tensorwise"."""


@dataclass(frozen=True)
class Case:
    """A model and its call."""

    model: str
    """A name that `benchmarks.architectures.build` accepts, or "MoE"; the prefix "tiny " shrinks the model."""
    batch: int
    length: int
    """Tokens, or pixels along a side."""
    training: bool
    dtype: str = "bf16"

    def __str__(self) -> str:
        kind = "training step" if self.training else "inference"
        return f"{self.model}, {self.batch} x {self.length}, {kind}, {self.dtype}"

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model and its inputs; for training the model is in training mode, and returns a loss."""
        if (blocks := self.model.removeprefix(TINY)) == "SwiGLU":
            sizes = (64, 192) if self.model.startswith(TINY) else (4096, 14336)
            return Gated(2, *sizes), (torch.randn(self.batch, self.length, sizes[0]),)
        if blocks != "MoE":
            return build(self.model, self.batch, self.length, self.training)
        model = Mixture(1, 64, 4, 256) if self.model.startswith(TINY) else Mixture(4, 1024, 8, 32000)
        tokens, targets = torch.randint(256, (2, self.batch, self.length))
        return model.train(self.training), (tokens, targets) if self.training else (tokens,)


class Gated(nn.Module):
    """Llama's feed-forward blocks, without attention, and a loss."""

    def __init__(self, blocks: int, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(blocks))
        self.gates, self.ups = (
            nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(blocks)) for _ in range(2)
        )
        self.downs = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            h = norm(x)
            x = x + down(F.silu(gate(h)) * up(h))
        return x.square().mean()


class Experts(nn.Module):
    """A feed-forward layer of `experts`, of which each token uses the two that a router picks.

    Autocast has no rule for grouped products, so the layer casts their operands itself, as such models do.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.into = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.out = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        share, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        experts = torch.arange(len(self.into), device=x.device).unsqueeze(1)
        ends = (chosen.flatten() == experts).sum(1).cumsum(0).to(torch.int32)
        into, out = self.into.bfloat16(), self.out.bfloat16()
        hidden = F.silu(F.grouped_mm(tokens.bfloat16()[order // 2], into, offs=ends))
        weighted = F.grouped_mm(hidden, out, offs=ends) * share.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // 2, weighted.to(tokens.dtype)).view_as(x)


class Mixture(nn.Module):
    """A decoder-only transformer with RMS norms and experts in place of its MLPs."""

    def __init__(self, layers: int, width: int, experts: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.attended = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, time, vocab), or with `targets` their mean cross-entropy in nats."""
        x = self.tokens(tokens)
        for i, (qkv, attended, experts) in enumerate(zip(self.qkv, self.attended, self.experts, strict=True)):
            q, k, v = qkv(self.norms[2 * i](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
            x = x + attended(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + experts(self.norms[2 * i + 1](x))
        logits = self.head(self.norms[-1](x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


DEFAULT = (
    Case("GPT 124M", 8, 1024, training=True),
    Case("GPT 124M", 1, 16, training=False),
    Case("UNet", 8, 64, training=True),
    Case("UNet", 1, 64, training=False),
    Case("MoE", 4, 1024, training=True),
    Case("MoE", 1, 16, training=False),
)
MORE = (
    Case("GPT 124M", 1, 1, training=False),
    Case("GPT 124M", 8, 1024, training=False),
    Case("GPT 124M", 8, 1024, training=True, dtype="f16"),
    Case("Llama", 4, 1024, training=True),
    Case("Llama", 1, 16, training=False),
    Case("BERT", 8, 512, training=True),
    Case("T5", 8, 512, training=True),
    Case("ViT", 32, 224, training=True),
    Case("ResNet-50", 32, 224, training=True),
)
"""Further cases, counted with `--all`."""
IN_FP8 = (Case("SwiGLU", 4, 2048, training=True), Case("Llama d4096", 4, 2048, training=True))
"""Cases counted with `--fp8`, for `FP8_PEERS`."""
SMALL_IN_FP8 = Case("tiny SwiGLU", 4, 128, training=True)
SMALL = (
    Case("GPT 1x64", 4, 128, training=True),
    Case("GPT 1x64", 1, 16, training=False),
    Case("tiny UNet", 2, 16, training=True),
    Case("tiny MoE", 2, 64, training=True),
)
"""Cases of seconds, for tests and `--tiny`."""
