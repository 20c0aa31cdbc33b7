"""Stands for another library's pooling, as torchvision's RoIPool: code that one imports and can't edit."""

import torch
from torch import Tensor, nn


class RoIPool(nn.Module):
    """Averages features inside boxes, in `size` by `size` bins."""

    def __init__(self, size: int, spatial_scale: float) -> None:
        super().__init__()
        self.size, self.spatial_scale = size, spatial_scale

    def forward(self, x: Tensor, rois: Tensor) -> Tensor:
        """`x`: (N, C, H, W); `rois`: (K, 5), batch index and left, top, right, bottom. Gives (K, C, size, size)."""
        # Boxes take the features' dtype: float16 has no number between 2048 and 2050, bfloat16 none from 256 to 258.
        left, top, right, bottom = (rois[:, 1:].to(x.dtype) * self.spatial_scale).unbind(1)
        columns, rows = self._shares(left, right, x.shape[3]), self._shares(top, bottom, x.shape[2])
        return rows.unsqueeze(1) @ x[rois[:, 0].long()] @ columns.unsqueeze(1).mT

    def _shares(self, start: Tensor, end: Tensor, pixels: int) -> Tensor:
        """(K, size, pixels): what part of each bin lies in each pixel."""
        step = ((end - start) / self.size).view(-1, 1, 1)
        first = start.view(-1, 1, 1) + step * torch.arange(self.size, device=start.device).view(1, -1, 1)
        pixel = torch.arange(pixels, device=start.device)
        inside = torch.minimum(first + step, pixel + 1) - torch.maximum(first, pixel)
        return inside.clamp(min=0) / step
