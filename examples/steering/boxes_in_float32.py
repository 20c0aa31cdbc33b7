"""An imported pooling class kept in float32: features that arrive in float16 are raised, boxes are never lowered.

python -m examples.steering.boxes_in_float32
"""

from typing import Any

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import keep_fp32
from ampcompile.insight.report import Report
from examples.steering.imported_pooling import RoIPool

Wrapped = keep_fp32(RoIPool)


class Subclassed(RoIPool):
    """The same by hand, where one wants a class of one's own."""

    forward = keep_fp32(RoIPool.forward)


class Detector(nn.Module):
    """Features of a picture, pooled in boxes."""

    def __init__(self, pool: type[RoIPool]) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, 4, 3, padding=1)
        self.pool = pool(2, spatial_scale=1.0)

    def forward(self, picture: Tensor, rois: Tensor) -> Tensor:
        return self.pool(self.backbone(picture), rois)


def boxes(dtype: torch.dtype) -> Tensor:
    """Two boxes that float16 can't hold: it rounds odd numbers above 2048."""
    return torch.tensor([[0, 2051, 1, 2055, 3], [0, 3, 0, 2053, 4]], dtype=dtype)


def error(pool: type[RoIPool], rois: Tensor) -> float:
    """Largest error of a pool's result in float16 mixed precision, beside the one computed from the same features."""
    detector = Detector(pool)
    picture = torch.randn(1, 1, 4, 2100)
    options: dict[str, Any] = {"dtype": torch.float16, "lower": "aot_eager"}
    with torch.no_grad():
        pooled = torch.compile(detector, backend="amp", options=options)(picture, rois)
        features = torch.compile(detector.backbone, backend="amp", options=options)(picture)
        exact = RoIPool(2, 1.0)(features.double(), rois)
    return float((pooled - exact).abs().max())


def explained(pool: type[RoIPool], rois: Tensor) -> Report:
    """What is cast, and what runs in what."""
    return ampcompile.explain(Detector(pool), dtype=torch.float16)(torch.randn(1, 1, 4, 2100), rois)


def main() -> None:
    """Prints how far off the boxes are with the class as it is, wrapped and subclassed, and what runs in what."""
    for title, pool in {"as imported": RoIPool, "wrapped": Wrapped, "subclassed": Subclassed}.items():
        found = [f"{error(pool, boxes(dtype)):.1e} with boxes in {dtype}" for dtype in (torch.float32, torch.int64)]
        print(f"{title}: error {', '.join(found)}")
        ops = [(op.op, op.dtype) for op in explained(pool, boxes(torch.int64)).ops if op.module == "pool"]
        print("  ", ", ".join(sorted({f"{op} in {dtype}" for op, dtype in ops if dtype and dtype.is_floating_point})))


if __name__ == "__main__":
    main()
