"""A UNet: convolutions, group norms and skip connections across the resolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
