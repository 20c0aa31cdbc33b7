"""The generic step is torch's; an optimizer that skips by itself finds its scale and flag, and keeps neither."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.scaler.generic import generic_step
from tests.scaler.cases import params_with, scaled


class Skipping(torch.optim.SGD):
    """Stands for one that unscales and skips by itself; notes what it was given."""

    _step_supports_amp_scaling = True
    seen: tuple[Tensor | None, Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        self.seen = self.grad_scale, self.found_inf
        return "stepped"


def stepped(optimizer: Any, unscaled: bool = False) -> Any:
    """A generic step under a scale of 4."""
    scaler = scaled(init_scale=4.0)
    if unscaled:
        scaler.unscale_(optimizer)
    return generic_step(scaler, optimizer, scaler._per_optimizer_states[id(optimizer)], (), {})


@pytest.mark.parametrize(("grad", "left"), [(4.0, 0.9), (float("inf"), 1.0)])
@pytest.mark.parametrize("unscaled", [True, False])
def test_gradients_are_unscaled_once_and_an_overflow_skips(grad: float, left: float, unscaled: bool) -> None:
    (param,) = params_with(grad)
    stepped(torch.optim.SGD([param], lr=0.1), unscaled)
    torch.testing.assert_close(param.detach(), torch.full((3,), left))


def test_an_optimizer_without_checked_gradients_is_refused() -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        stepped(torch.optim.SGD(params_with(None), lr=0.1))


@pytest.mark.parametrize(
    ("unscaled", "preset", "given"), [(False, None, 4.0), (False, 3.0, 12.0), (True, None, None), (True, 3.0, 3.0)]
)
@pytest.mark.parametrize("grad", [1.0, float("nan")])
def test_scale_and_flag_are_there_during_the_step_alone(
    unscaled: bool, preset: float | None, given: float | None, grad: float
) -> None:
    optimizer = Skipping(params_with(grad), lr=0.1)
    if preset is not None:
        optimizer.grad_scale = torch.tensor(preset)
    assert stepped(optimizer, unscaled) == "stepped"
    assert optimizer.seen is not None
    scale, flag = optimizer.seen
    assert (scale if given is None else scale.item()) == given
    assert flag.item() == (grad != grad)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_without_gradients_the_flag_is_zero() -> None:
    optimizer = Skipping(params_with(None), lr=0.1)
    stepped(optimizer)
    assert optimizer.seen is not None and optimizer.seen[1].item() == 0
