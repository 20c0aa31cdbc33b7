"""Parts of `linear_cross_entropy`: sums of rows of 16-bit logits, loss and gradient from them, float32 in registers.

With N rows of C logits of 2 bytes: forward reads 2·N·C bytes and takes 4·N·C flops; backward reads and writes 2·N·C
each, with 5·N·C flops. Kept for backward: 8 bytes a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .usable import on_device_of


class Kind(NamedTuple):
    """Settings of a cross entropy: the non-tensor arguments of `torch.nn.functional.cross_entropy`."""

    reduction: str
    ignore_index: int
    label_smoothing: float


def row_sums(logits: Tensor, weight: Tensor | None, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of each row of (rows, classes), in two parts (2, rows); if `weighted`, also the `weight`ed sum.

    The parts are the largest logit and the logarithm of the sum of exp(logit - largest): a small logarithm would lose
    its digits if they were added.
    """
    if logits.is_cuda:
        from .triton import cross_entropy as gpu

        with on_device_of(logits):
            return gpu.row_sums(logits, weight, weighted)
    wide = logits.float()
    top = wide.amax(1)
    below = top.where(top != -torch.inf, 0.0)
    lse = torch.stack((top, (wide - below.unsqueeze(1)).exp().sum(1).log()))
    return lse, (wide if weight is None else wide * weight).sum(1) if weighted else None


def picked_logits(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The logit of each row's target, float32; any logit in ignored rows."""
    return logits.gather(1, _index(target, ignore_index).unsqueeze(1)).squeeze(1).float()


def row_weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The weight of each row's class, float32; 0 in ignored rows."""
    used = target != ignore_index
    return used.float() if weight is None else weight.float().gather(0, _index(target, ignore_index)).where(used, 0.0)


def loss_of_rows(
    lse: Tensor,
    picked: Tensor,
    weighted: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    kind: Kind,
) -> Tensor:
    """The loss, computed from the sums and picked logits of each row."""
    of_row = row_weights(target, weight, kind.ignore_index)
    top, rest = lse
    rows = (1 - kind.label_smoothing) * of_row * (rest + (top - picked))
    if weighted is not None:
        total = _total_weight(weight, classes)
        rows = rows + kind.label_smoothing / classes * (total * rest + (total * top - weighted))
    rows = rows.where(target != kind.ignore_index, 0.0)
    if kind.reduction == "none":
        return rows
    return rows.sum() / of_row.sum() if kind.reduction == "mean" else rows.sum()


class Coefficients(NamedTuple):
    """Terms of a row's gradient: `probability * exp(logit - log-sum-exp) - smoothing * weight - hit at the target`."""

    probability: Tensor
    hit: Tensor
    smoothing: Tensor | None

    def of(self, rows: slice) -> "Coefficients":
        """The coefficients of some of the rows."""
        smoothing = None if self.smoothing is None else self.smoothing[rows]
        return Coefficients(self.probability[rows], self.hit[rows], smoothing)


def coefficients(grad: Tensor, target: Tensor, weight: Tensor | None, classes: int, kind: Kind) -> Coefficients:
    """The coefficients of each row's gradient, from the gradient of the loss, (rows,) or 0-dim."""
    of_row = row_weights(target, weight, kind.ignore_index)
    if kind.reduction == "mean":
        grad = grad / of_row.sum()
    grad = grad.where(target != kind.ignore_index, 0.0)
    hit = grad * (1 - kind.label_smoothing) * of_row
    smoothing = grad * (kind.label_smoothing / classes) if kind.label_smoothing else None
    probability = hit if smoothing is None else hit + smoothing * _total_weight(weight, classes)
    return Coefficients(probability, hit, smoothing)


def gradient(logits: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, rows: Coefficients) -> Tensor:
    """The gradient of the logits, in their type. `target` includes ignored rows, where `hit` is 0."""
    top, rest = lse.unsqueeze(2)
    out = (logits.float() - top - rest).exp() * rows.probability.unsqueeze(1)
    if rows.smoothing is not None:
        smoothing = rows.smoothing.unsqueeze(1)
        out = out - (smoothing if weight is None else smoothing * weight)
    at_target = torch.arange(logits.shape[1], device=logits.device) == target.unsqueeze(1)
    return (out - torch.where(at_target, rows.hit.unsqueeze(1), 0.0)).to(logits.dtype)


def _index(target: Tensor, ignore_index: int) -> Tensor:
    return target.where(target != ignore_index, 0)


def _total_weight(weight: Tensor | None, classes: int) -> Tensor | int:
    return classes if weight is None else weight.sum(dtype=torch.float32)
