"""Peers take the same steps: whoever scales, accumulates or clips gets the same losses."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from benchmarks.steps import TrainingStep, inference
from benchmarks.works import Steps


class Regression(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ self.weight - y).square().mean()


def losses(weight: Tensor, inputs: tuple[Tensor, Tensor], steps: Steps, ours: bool) -> list[float]:
    model = Regression(weight)
    step = TrainingStep(model, model, inputs, nullcontext, steps, ours)
    for _ in range(6):
        step()
    assert model.weight.grad is None
    return step.history()


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("scaler", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_ours_and_torchs_agree(accumulate: int, scaler: bool, clip: bool) -> None:
    weight, inputs = torch.randn(5, 3), (torch.randn(7, 5), torch.randn(7, 3))
    steps = Steps("", accumulate, clip, scaler)
    expected = losses(weight, inputs, steps, ours=False)
    assert losses(weight, inputs, steps, ours=True) == pytest.approx(expected, rel=1e-4)
    assert losses(weight, inputs, Steps("", 1, clip, False), ours=False) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_inference_has_no_gradients_and_the_precision_asked_for() -> None:
    layer = nn.Linear(4, 4)
    output = inference(layer, (torch.randn(2, 4),), lambda: torch.autocast("cpu", torch.bfloat16))()
    assert output.dtype is torch.bfloat16 and not output.requires_grad
