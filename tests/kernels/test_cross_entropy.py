"""Sums of rows of 16-bit logits give the loss and the gradient that torch gives of the logits in float32."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels.cross_entropy import Kind, coefficients, gradient, loss_of_rows, picked_logits, row_sums

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW, HIGH = [torch.float16, torch.bfloat16], torch.float32
REDUCTIONS = ["none", "mean", "sum"]
SHAPES = [(1, 1), (3, 2), (5, 37), (8, 64), (2, 4100), (0, 7)]


def operands(
    shape: tuple[int, int], dtype: torch.dtype, device: str, weighted: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, classes = shape
    logits = (4 * torch.randn(shape, device=device)).to(dtype)
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = -100
    return logits, target, torch.rand(classes, device=device) + 0.5 if weighted else None


def value_and_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Ours: the loss, and the gradient of the logits where that of the loss is `upstream`."""
    kind, classes, logits = Kind(reduction, ignore_index, label_smoothing), logits.shape[1], logits.detach()
    lse, weighted = row_sums(logits, weight, label_smoothing != 0)
    picked = picked_logits(logits, target, ignore_index)
    loss = loss_of_rows(lse, picked, weighted, target, weight, classes, kind)
    rows = coefficients(upstream(loss), target, weight, classes, kind)
    return loss, gradient(logits, lse, target, weight, rows)


def torchs(logits: Tensor, target: Tensor, weight: Tensor | None, wide: torch.dtype, **options: Any) -> Any:
    """The same by torch, with the casts of eager autocast, or in float64."""
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(leaf.to(wide), target, None if weight is None else weight.to(wide), **options)
    return loss.detach(), torch.autograd.grad((loss * upstream(loss)).sum(), leaf)[0]


def upstream(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, loss.numel()).to(loss).view_as(loss)


def assert_no_further_than_autocast(given: tuple[Tensor, Tensor, Tensor | None], options: dict[str, Any]) -> None:
    """Loss and gradient, from float64."""
    loss, grad = torchs(given[0].detach().double(), *given[1:], torch.float64, **options)
    theirs, their_grad = torchs(*given, HIGH, **options)
    ours, our_grad = value_and_gradient(*given, **options)
    assert ours.dtype == torch.float32 and ours.shape == loss.shape and our_grad.dtype == given[0].dtype
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(our_grad.isnan(), their_grad.isnan())
    if given[0].numel() and loss.isfinite().all() and grad.isfinite().all():
        # Which of two float32 computations is luckier is noise: two units in the last place of a row's largest number.
        rows, classes = given[0].shape
        noise = 2**-22 * (given[0].detach().abs().max().item() + 1 + math.log(classes))
        added = rows if options.get("reduction") == "sum" else 1
        assert furthest(ours, loss) <= furthest(theirs, loss) + added * noise
        assert furthest(our_grad, grad) <= furthest(their_grad, grad) + noise


def furthest(values: Tensor, exact: Tensor) -> float:
    return (values.double() - exact).abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_are_no_further_from_float64_than_autocasts(
    shape: tuple[int, int], weighted: bool, dtype: torch.dtype, device: str
) -> None:
    for reduction, smoothing in itertools.product(REDUCTIONS, [0.0, 0.1]):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        assert_no_further_than_autocast(operands(shape, dtype, device, weighted), options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_rows(reduction: str, smoothing: float, device: str) -> None:
    logits, target, _ = operands((4, 5), torch.bfloat16, device)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}
    assert_no_further_than_autocast((logits, torch.tensor([3, 1, 3, 0], device=device), None), options)
    all_ignored = torch.full_like(target, 3)
    assert_no_further_than_autocast((logits, all_ignored, None), options)
    loss, grad = value_and_gradient(logits, all_ignored, None, **options)
    assert (grad == 0).all() and (loss.isnan().all() if reduction == "mean" else (loss == 0).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["a number", "the target's", "a row", "all but the target's", "an ignored row"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinite_and_nan_logits_reach_what_they_reach_in_torch(
    where: str, value: float, smoothing: float, device: str
) -> None:
    logits, _, _ = operands((4, 9), torch.bfloat16, device)
    target = torch.tensor([0, 2, -100, 8], device=device)
    with torch.no_grad():
        if where == "all but the target's":
            logits[1] = logits[1].where(torch.arange(9, device=device) == 2, value)
        else:
            logits[{"a number": (1, 3), "the target's": (1, 2), "a row": 1, "an ignored row": 2}[where]] = value
    options = {"reduction": "none", "label_smoothing": smoothing}
    ours, theirs = value_and_gradient(logits, target, None, **options), torchs(logits, target, None, HIGH, **options)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device: str) -> None:
    wide, target, weight = operands((6, 40), torch.bfloat16, device, weighted=True)
    for logits in (wide[:, 3:20], wide[:, ::3], wide.detach().t().contiguous().t(), wide[:1, :20].expand(6, 20)):
        given = (logits.detach(), target % logits.shape[1], weight[: logits.shape[1]])
        assert given[0].stride() == logits.stride()
        assert_no_further_than_autocast(given, {"label_smoothing": 0.1})


def test_a_float16_gradient_is_scaled_before_it_is_rounded() -> None:
    logits, target = torch.zeros(2000, 50, dtype=torch.float16), torch.zeros(2000, dtype=torch.long)
    kind, (lse, _) = Kind("mean", -100, 0.0), row_sums(logits, None, False)
    rows = coefficients(torch.tensor(65536.0), target, None, 50, kind)
    scaled = gradient(logits, lse, target, None, rows)
    torch.testing.assert_close(scaled[:, 1], torch.full((2000,), 65536 / 2000 / 50, dtype=torch.float16))
