"""The one compiled operator that torchvision doesn't import without. Its wheels are built for CUDA, and can't be loaded
beside a torch that is built for CPUs; what else it has in C++, it has in Python too.
"""

from __future__ import annotations

import contextlib
import importlib.util

import torch
from torch import Tensor

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def stand_in() -> None:
    """Define torchvision's `nms` in Python, if its own can't be loaded."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for folder in spec.submodule_search_locations or ():
        with contextlib.suppress(OSError):
            return torch.ops.load_library(f"{folder}/_C.so")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.impl("nms", nms, "CPU")
    from torchvision.ops import boxes

    boxes._assert_has_ops = lambda: None


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Of `boxes` [N, 4] as corners, those that no box of a higher score [N] covers by more than the threshold: their
    places, [M], by falling score.
    """
    kept: list[int] = []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    for place in scores.argsort(descending=True, stable=True).tolist():
        others = torch.tensor(kept, dtype=torch.long)
        low = torch.maximum(boxes[place, :2], boxes[others, :2])
        high = torch.minimum(boxes[place, 2:], boxes[others, 2:])
        common = (high - low).clamp(min=0).prod(1)
        if not (common / (areas[place] + areas[others] - common) > iou_threshold).any():
            kept.append(place)
    return torch.tensor(kept, dtype=torch.long)
