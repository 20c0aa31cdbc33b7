"""Cross entropy of 16-bit logits: numbers, gradients and odd cases are torch's, of the logits in float32."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from tests.devices import DEVICES

LOW = [torch.float16, torch.bfloat16]
REDUCTIONS = ["none", "mean", "sum"]
SHAPES = [(1, 1), (3, 2), (5, 37), (8, 64), (2, 4100), (0, 7)]


def operands(
    shape: tuple[int, int], dtype: torch.dtype, device: str, weighted: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, classes = shape
    logits = (4 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = -100
    return logits, target, torch.rand(classes, device=device) + 0.5 if weighted else None


def autocast(logits: Tensor, target: Tensor, weight: Tensor | None, z_loss: float = 0.0, **options: Any) -> Tensor:
    """The same with casts as eager autocast makes them."""
    return cross_entropy_reference(logits.float(), target, weight, z_loss=z_loss, **options)[0]


def in_float64(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    return cross_entropy_reference(logits.double(), target, None if weight is None else weight.double(), **options)[0]


def assert_no_further_than_autocast(given: tuple[Tensor, Tensor, Tensor | None], options: dict[str, Any]) -> None:
    """Loss and gradient, scaled as float16's are; from float64."""
    exact = (given[0].detach().double().requires_grad_(), *given[1:])
    results = []
    for f, operands in ((in_float64, exact), (autocast, given), (lambda *a, **k: cross_entropy(*a, **k)[0], given)):
        loss = f(*operands, **options)
        upstream = torch.linspace(0.5, 2, loss.numel()).to(loss).view_as(loss)
        results.append((loss.detach(), *torch.autograd.grad((loss * upstream).sum(), operands[0])))
    (loss, grad), (torchs, torchs_grad), (ours, our_grad) = results
    assert ours.dtype == torch.float32 and ours.shape == loss.shape and our_grad.dtype == given[0].dtype
    assert torch.equal(ours.isnan(), torchs.isnan()) and torch.equal(our_grad.isnan(), torchs_grad.isnan())
    if given[0].numel() and loss.isfinite().all() and grad.isfinite().all():
        # Which of two float32 computations is luckier is noise: two units in the last place of a row's largest number.
        rows, classes = given[0].shape
        noise = 2**-22 * (given[0].detach().abs().max().item() + 1 + math.log(classes))
        added = rows if options.get("reduction") == "sum" else 1
        assert furthest(ours, loss) <= furthest(torchs, loss) + added * noise
        assert furthest(our_grad, grad) <= furthest(torchs_grad, grad) + noise


def furthest(values: Tensor, exact: Tensor) -> float:
    return (values.double() - exact).abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_are_no_further_from_float64_than_autocasts(
    shape: tuple[int, int], weighted: bool, dtype: torch.dtype, device: str
) -> None:
    for reduction, smoothing, z_loss in itertools.product(REDUCTIONS, [0.0, 0.1], [0.0, 1e-2]):
        options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
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
    loss, _ = cross_entropy(logits, all_ignored, None, **options)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
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
    ours, theirs = cross_entropy(logits, target, **options)[0], autocast(logits, target, None, **options)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    grads = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device: str) -> None:
    wide, target, weight = operands((6, 40), torch.bfloat16, device, weighted=True)
    for logits in (wide[:, 3:20], wide[:, ::3], wide.detach().t().contiguous().t(), wide[:1, :20].expand(6, 20)):
        given = (logits.detach().requires_grad_(), target % logits.shape[1], weight[: logits.shape[1]])
        assert given[0].stride() == logits.stride()
        assert_no_further_than_autocast(given, {"label_smoothing": 0.1})


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_a_target_out_of_range_raises(bad: int) -> None:
    logits, target, _ = operands((4, 5), torch.bfloat16, "cpu")
    target[2] = bad
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(logits, target)


def test_a_float16_gradient_is_scaled_before_it_is_rounded() -> None:
    logits, target = torch.zeros(2000, 50, dtype=torch.float16, requires_grad=True), torch.zeros(2000, dtype=torch.long)
    loss, _ = cross_entropy(logits, target)
    (scaled,) = torch.autograd.grad(loss * 65536, logits)
    torch.testing.assert_close(scaled[:, 1], torch.full((2000,), 65536 / 2000 / 50, dtype=torch.float16))


def test_the_op_keeps_torchs_rules() -> None:
    given = operands((6, 21), torch.bfloat16, "cpu")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.ampcompile.cross_entropy.default, given, test_utils=checks)
    assert F.cross_entropy(given[0].float(), given[1]).item() == pytest.approx(cross_entropy(*given[:2])[0].item())
