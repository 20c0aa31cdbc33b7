"""Cross entropy of 16-bit logits, float32 only in registers: log-sum-exp in one read, gradients written in 16 bits.

With N rows of C logits of 2 bytes: forward reads 2·N·C bytes and takes 4·N·C flops; backward reads and writes 2·N·C
each, with 5·N·C flops. Kept for backward: the logits, and 8 bytes a row.

The gradient is plain torch on every device. Inductor compiles it to one loop that overwrites logits which nothing else
reads. It couldn't allow that to a kernel of ours: there the logits are an input of the backward graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.torch_private.dispatcher import triton_op

from .usable import on_device_of


class Kind(NamedTuple):
    """Settings of a cross entropy: the non-tensor arguments of `torch.nn.functional.cross_entropy`, and `z_loss`."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float


@triton_op("ampcompile::cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`torch.nn.functional.cross_entropy(logits.float(), target, ...)`, and each row's log-sum-exp in two parts.

    `logits`: (rows, classes), float16, bfloat16 or float32. `target`: (rows,), int64. `weight`: (classes,), float32.
    `z_loss` times the squared log-sum-exp is added to a row's loss. Both results are float32; the loss is (rows,) if
    `reduction` is "none", else 0-dim. The parts, (2, rows), without a gradient, are the largest logit and the logarithm
    of the sum of exp(logit - largest): a small logarithm would lose its digits if they were added. A target out of
    range raises as `gather` does.
    """
    kind = Kind(reduction, ignore_index, label_smoothing, z_loss)
    lse, weighted = row_sums(logits, weight, label_smoothing != 0)
    picked = picked_logits(logits, target, ignore_index)
    return loss_of_rows(lse, picked, weighted, target, weight, logits.shape[1], kind), lse


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` in plain torch, in the type of the logits if that is wider than float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    parts = torch.stack(_parts(wide))
    loss = torch.nn.functional.cross_entropy(
        wide, target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if z_loss:
        rows = z_loss * wide.logsumexp(1).square() * (target != ignore_index)
        total = row_weights(target, weight, ignore_index).sum() if reduction == "mean" else 1
        loss = loss + (rows if reduction == "none" else rows.sum() / total)
    return loss, parts.detach()


def row_sums(logits: Tensor, weight: Tensor | None, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of each row of (rows, classes), in two parts (2, rows); if `weighted`, also the `weight`ed sum."""
    if logits.is_cuda:
        from .triton import cross_entropy as gpu

        with on_device_of(logits):
            return gpu.row_sums(logits, weight, weighted)
    wide = logits.float()
    return torch.stack(_parts(wide)), (wide if weight is None else wide * weight).sum(1) if weighted else None


def _parts(wide: Tensor) -> tuple[Tensor, Tensor]:
    top = wide.amax(1)
    below = top.where(top != -torch.inf, 0.0)
    return top, (wide - below.unsqueeze(1)).exp().sum(1).log()


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
    if kind.z_loss:
        rows = rows + kind.z_loss * (top + rest).square()
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


def coefficients(
    grad: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, classes: int, kind: Kind
) -> Coefficients:
    """The coefficients of each row's gradient, from the gradient of the loss, (rows,) or 0-dim."""
    of_row = row_weights(target, weight, kind.ignore_index)
    if kind.reduction == "mean":
        grad = grad / of_row.sum()
    grad = grad.where(target != kind.ignore_index, 0.0)
    hit = grad * (1 - kind.label_smoothing) * of_row
    smoothing = grad * (kind.label_smoothing / classes) if kind.label_smoothing else None
    probability = hit if smoothing is None else hit + smoothing * _total_weight(weight, classes)
    if kind.z_loss:
        probability = probability + grad * (2 * kind.z_loss) * lse.sum(0)
    return Coefficients(probability, hit, smoothing)


def gradient(logits: Tensor, lse: Tensor, target: Tensor, weight: Tensor | None, rows: Coefficients) -> Tensor:
    """The gradient of the logits, in their type. `target` includes ignored rows, where `hit` is 0."""
    top, rest = lse.unsqueeze(2)
    out = (logits.float() - top - rest).exp() * rows.probability.unsqueeze(1)
    if rows.smoothing is not None:
        smoothing = rows.smoothing.unsqueeze(1)
        out = out - (smoothing if weight is None else smoothing * weight)
    at_target = torch.arange(logits.shape[1], device=logits.device) == target.unsqueeze(1)
    # `out` is used once: used twice, Inductor would store it as a buffer of its own, and not overwrite the logits.
    return (out - torch.where(at_target, rows.hit.unsqueeze(1), 0.0)).to(logits.dtype)


def _index(target: Tensor, ignore_index: int) -> Tensor:
    return target.where(target != ignore_index, 0)


def _total_weight(weight: Tensor | None, classes: int) -> Tensor | int:
    return classes if weight is None else weight.sum(dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, weight, *kind = inputs
    ctx.save_for_backward(logits, target, weight, output[1])
    ctx.kind = Kind(*kind)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, target, weight, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    rows = coefficients(grad, lse, target, weight, logits.shape[1], ctx.kind)
    return gradient(logits, lse, target, weight, rows), *[None] * 6


cross_entropy.register_autograd(_backward, setup_context=_remember)
