"""Small models, and data from which they learn something: text of a second-order chain, noisy images of a few kinds."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architectures import Transformers
from benchmarks.models import GPT, GPTConfig, UNet

STEPS = 150
TEXT = GPTConfig(layers=2, width=64, heads=2, vocab=32, context=32)
KINDS, SIDE = 10, 16


class Subject(NamedTuple):
    """A model in training mode that gives a loss for a batch, and batches."""

    model: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], list[tuple[Tensor, Tensor]]]
    rate: float
    """Of AdamW at the first step; it falls to 0 in a line."""
    lower: str = "aot_eager"
    """The option `lower` of amp; by Inductor where it compiles in seconds."""


class Experts(nn.Module):
    """In place of a linear layer: each token through the two of four that a router likes best, weighted."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.weight = nn.Parameter(torch.randn(4, width, out) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to [batch, time, out]."""
        best, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(*x.shape[:2], 4, dtype=best.dtype).scatter(2, chosen, best)
        return (torch.einsum("btd,edo->bteo", x, self.weight) * gates.unsqueeze(-1)).sum(2)


def mixture() -> nn.Module:
    """A GPT whose blocks choose experts."""
    found = GPT(TEXT)
    for block in found.blocks:
        block.mlp_in = Experts(TEXT.width, 4 * TEXT.width)
    return found


def vit() -> nn.Module:
    """Two layers over patches of 4 by 4."""
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(**small, **dry, image_size=SIDE, patch_size=4, num_labels=KINDS)
    return Transformers(ViTForImageClassification(config), "pixel_values", "labels").train()


def resnet() -> nn.Module:
    """Two stages of one basic block, with batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=KINDS)
    return Transformers(ResNetForImageClassification(config), "pixel_values", "labels").train()


def texts(draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Tokens and those that follow, each drawn by the two before it; [16, 32]."""
    task = torch.Generator().manual_seed(0)
    last, before = (1.5 * torch.randn(TEXT.vocab, TEXT.vocab, generator=task) for _ in range(2))
    tokens = list(torch.randint(TEXT.vocab, (2, 16 * STEPS), generator=draw))
    for _ in range(TEXT.context - 1):
        chances = (last[tokens[-1]] + before[tokens[-2]]).softmax(-1)
        tokens.append(chances.multinomial(1, generator=draw).flatten())
    found = torch.stack(tokens, 1).view(STEPS, 16, TEXT.context + 1)
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in found]


def _pictures(draw: torch.Generator, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each step: clean images, the same in noise, and their kinds."""
    task = torch.Generator().manual_seed(0)
    kinds = F.interpolate(torch.randn(KINDS, 3, 4, 4, generator=task), SIDE, mode="bilinear")
    labels = torch.randint(KINDS, (STEPS, batch), generator=draw)
    clean = kinds[labels]
    return clean, clean + 2.0 * torch.randn(clean.shape, generator=draw), labels


def labelled(draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Noisy images [32, 3, SIDE, SIDE] and their kinds."""
    _, noisy, labels = _pictures(draw, 32)
    return list(zip(noisy, labels, strict=True))


def noisy(draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Noisy images and clean ones, [8, 3, SIDE, SIDE]."""
    clean, found, _ = _pictures(draw, 8)
    return list(zip(found, clean, strict=True))


SUBJECTS = {
    "GPT": Subject(lambda: GPT(TEXT), texts, 3e-3, "inductor"),
    "MoE": Subject(mixture, texts, 3e-3),
    "ViT": Subject(vit, labelled, 1e-3),
    "ResNet": Subject(resnet, labelled, 3e-3),
    "UNet": Subject(lambda: UNet(8, (1, 2)), noisy, 3e-3, "inductor"),
}
