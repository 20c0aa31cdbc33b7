"""Plain PyTorch models to measure and train, a GPT and a UNet: nothing in them knows about precision."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT; the number of parameters is about 12 · layers · width² + vocab · width."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    tied: bool = True
    """The head shares the embedding's weight."""


GPT_13M = GPTConfig(layers=4, width=512, heads=8, vocab=256, context=128)
GPT_23M = GPTConfig(layers=6, width=512, heads=8, vocab=8192, context=256)
GPT_124M = GPTConfig(layers=12, width=768, heads=12, vocab=50304, context=1024)
GPT_124M_ODD = replace(GPT_124M, vocab=50257)
GPT_1_3B = GPTConfig(layers=24, width=2048, heads=16, vocab=50304, context=2048)


class Block(nn.Module):
    """Attention and a GELU MLP, each after a layer norm and beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions, initialised as in GPT-2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # Layers that write to the skip connection start smaller, so that its variance doesn't grow.
                writes = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if writes else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, time, vocab) of the next tokens, or with `targets` their mean cross-entropy in nats.

        `tokens` and `targets` are int64 (batch, time), time at most `config.context`.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two convolutions, each after a group norm, beside a skip connection."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(8, channels_in)
        self.conv_in = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm_out = nn.GroupNorm(8, channels)
        self.conv_out = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Identity() if channels_in == channels else nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv_in(F.silu(self.norm_in(x)))
        return self.skip(x) + self.conv_out(F.silu(self.norm_out(hidden)))


class UNet(nn.Module):
    """Predicts an image from an image; `width`, a multiple of 8, are the channels at full resolution."""

    def __init__(self, width: int, multiples: tuple[int, ...] = (1, 2, 4), colours: int = 3) -> None:
        super().__init__()
        channels = [width * multiple for multiple in multiples]
        self.stem = nn.Conv2d(colours, width, 3, padding=1)
        self.down = nn.ModuleList(map(Residual, [width, *channels], channels))
        self.middle = Residual(channels[-1], channels[-1])
        below = [channels[-1], *channels[:0:-1]]
        self.up = nn.ModuleList(
            Residual(lower + same, same) for lower, same in zip(below, reversed(channels), strict=True)
        )
        self.norm = nn.GroupNorm(8, width)
        self.head = nn.Conv2d(width, colours, 3, padding=1)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """The predicted images, or with `targets` the mean squared error; all (batch, colours, height, width).

        Height and width are multiples of 2 to the number of resolutions.
        """
        x, kept = self.stem(images), []
        for block in self.down:
            kept.append(block(x))
            x = F.avg_pool2d(kept[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        predicted = self.head(F.silu(self.norm(x)))
        return predicted if targets is None else F.mse_loss(predicted, targets)
