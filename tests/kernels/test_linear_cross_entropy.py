"""A linear layer with its cross entropy, a piece of the rows at a time: numbers are those of the two apart."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels import linear_cross_entropy as kernel
from ampcompile.kernels.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tests.compiling import error
from tests.devices import DEVICES

LOW = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PIECE", 1)
    monkeypatch.setattr(kernel, "FEWEST", 4)


def operands(rows: int, features: int, classes: int, dtype: torch.dtype, device: str, bias: bool) -> list[Any]:
    x = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
    weight = torch.randn(classes, features, device=device).requires_grad_()
    b = torch.randn(classes, device=device).requires_grad_() if bias else None
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = -100
    return [x, weight, b, weight.detach().to(dtype), None if b is None else b.detach().to(dtype), target]


def results(f: Any, given: list[Any], options: dict[str, Any]) -> list[Tensor]:
    loss = f(*given, **options)[0]
    upstream = torch.linspace(0.5, 2, loss.numel()).to(loss).view_as(loss)
    return [loss.detach(), *torch.autograd.grad((loss * upstream).sum(), [t for t in given[:3] if t is not None])]


def in_float64(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **options: Any) -> Any:
    wide = (None if t is None else t.double() for t in (x, weight, bias))
    options["class_weight"] = None if options["class_weight"] is None else options["class_weight"].double()
    return linear_cross_entropy_reference(*wide, None, None, rest[2], *options.values())


def autocast(*given: Any, **options: Any) -> Any:
    return linear_cross_entropy_reference(*given, *options.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 2), (4, 8, 16), (13, 21, 37), (0, 5, 7)])
def test_value_and_gradients_are_no_further_from_float64_than_autocasts(
    shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, device: str
) -> None:
    weights = [None, torch.rand(shape[2], device=device)]
    sums = [0.0, 0.0]
    for weight, reduction, smoothing, z in itertools.product(weights, ["none", "mean", "sum"], [0.0, 0.1], [0.0, 1e-2]):
        options = {"class_weight": weight, "reduction": reduction, "ignore_index": -100}
        options |= {"label_smoothing": smoothing, "z_loss": z}
        given = operands(*shape, dtype, device, bias)
        exact, theirs, ours = (results(f, given, options) for f in (in_float64, autocast, linear_cross_entropy))
        for a, b, best in zip(ours, theirs, exact, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.isnan(), b.isnan())
            if best.isfinite().all() and best.abs().sum() > 1e-2:
                errors = error([a], [best]), error([b], [best])
                sums = [total + found for total, found in zip(sums, errors, strict=True)]
    # Both round logits and their gradients: which comes closer in a single case is luck.
    assert sums[0] <= 1.05 * sums[1]


def test_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given, sizes = operands(50, 8, 37, torch.bfloat16, "cpu", True), []

    def watched(x: Tensor, *others: Any, linear: Any = F.linear) -> Tensor:
        sizes.append(x.shape[0])
        return linear(x, *others)

    monkeypatch.setattr(F, "linear", watched)
    linear_cross_entropy(*given)[0].backward()
    assert sizes == [*[4] * 12, 2, *[4] * 12, 2]


def test_only_what_wants_a_gradient_gets_one() -> None:
    for wanted in itertools.product([False, True], repeat=3):
        given = operands(6, 5, 7, torch.bfloat16, "cpu", True)
        for tensor, wants in zip(given[:3], wanted, strict=True):
            tensor.requires_grad_(wants)
        loss, _ = linear_cross_entropy(*given)
        if any(wanted):
            loss.backward()
        assert [t.grad is not None for t in given[:3]] == list(wanted)


def test_the_same_bits_again() -> None:
    given = operands(13, 8, 37, torch.bfloat16, "cpu", True)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results(linear_cross_entropy, given, {}) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


def test_the_op_keeps_torchs_rules() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for reduction in ("mean", "none"):
        given = operands(6, 5, 21, torch.bfloat16, "cpu", True)
        torch.library.opcheck(LINEAR_CROSS_ENTROPY, (*given, None, reduction), test_utils=checks)
