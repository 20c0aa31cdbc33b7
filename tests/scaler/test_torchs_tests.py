"""What PyTorch's own tests assert of a GradScaler (test_torch.py, test_cuda.py, test_optim.py), on ours.

The name of each test is that of PyTorch's. What they assert of training, with unscaling, clipping, several optimizers
and pickles, test_differential.py compares with torch's own scaler.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ampcompile.errors import AmpWarning
from ampcompile.scaler.grad_scaler import GradScaler
from tests.devices import DEVICES
from tests.scaler.cases import scaled


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.device(request.param):
        yield request.param


def test_grad_scaling_scale(device: str) -> None:
    scaler = GradScaler(device, init_scale=2.0)
    four = torch.full((1,), 4.0)
    outputs = scaler.scale((four, (four, four), [four, (four, four)], (x for x in [four])))
    assert outputs[0] == outputs[1][1] == outputs[2][0] == outputs[2][1][0] == next(outputs[3]) == 8.0
    assert type(outputs[2]) is list and scaler._scale.device == four.device
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3.0)


def test_grad_scaling_unscale(device: str) -> None:
    """Every layout and type in one optimizer, and a bad number in each of them in turn."""

    def grads(bad: int) -> list[torch.Tensor]:
        four = torch.full((10, 10), 4.0)
        half = four.half()
        tensors = [
            four.clone(),
            four.clone()[:, :5],
            four.clone().t(),
            half.clone(),
            half.clone()[:, :5],
            four.double(),
        ]
        if bad >= 0:
            tensors[bad][2, 2] = math.inf if bad % 2 else math.nan
        return tensors

    scaler = GradScaler(device)
    params = [torch.empty_like(grad) for grad in grads(-1)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    for shape in ((1,), ()):
        for bad in range(-1, len(params)):
            for param, grad in zip(params, grads(bad), strict=True):
                param.grad = grad
            inverse, found_inf = torch.full(shape, 0.25), torch.full(shape, 0.0)
            flags = scaler._unscale_grads_(optimizer, inverse, found_inf, True)
            assert sum(flag.item() for flag in flags.values()) == (bad >= 0)
            assert found_inf.item() == 0
            if bad < 0:
                assert all((param.grad == 1).all() for param in params)


def test_grad_scaling_unscale_sparse(device: str) -> None:
    def sparse(values: list[float], dtype: torch.dtype = torch.float32, repeated: bool = False) -> torch.Tensor:
        columns = [2, 0, 2] if repeated else [2, 0, 1]
        return torch.sparse_coo_tensor([[0, 1, 0], columns], values, (2, 3), dtype=dtype, check_invariants=True)

    scaler = GradScaler(device)
    inverse, zero = torch.tensor([0.25]), torch.zeros(1)

    def found(param: torch.Tensor, allow_fp16: bool) -> float:
        flags = scaler._unscale_grads_(torch.optim.SGD([param], lr=1.0), inverse, zero, allow_fp16)
        return flags[param.device].item()

    for dtype in (torch.float32, torch.float16):
        param = sparse([16.0, 32.0, 64.0], dtype)
        param.grad = param.clone()
        assert found(param, True) == 0
        assert torch.equal(param.grad.to_dense(), (param / 4).to_dense())
        for bad in (math.inf, math.nan):
            param.grad = sparse([16.0, 32.0, bad], dtype)
            assert found(param, True) == 1
    # Finite entries of one index whose sum is not.
    param.grad = sparse([64000.0, 32.0, 64000.0], torch.float16, repeated=True)
    assert found(param, True) == 1


def test_grad_scale_will_not_overflow(device: str) -> None:
    """Neither within bounds nor, as torch does it, by refusing to grow."""
    for options, expected in (({}, 2.0**64), ({"max_scale": math.inf}, torch.tensor(1e38).item())):
        with nullcontext() if options else pytest.warns(AmpWarning, match="begins at the bound"):
            scaler = scaled(device=device, growth_interval=1, growth_factor=2.0**4, init_scale=1e38, **options)
        model = nn.Linear(5, 1)
        optimizer = torch.optim.Adam(model.parameters())
        scaler.scale((model(torch.randn(1, 5)) * 1e-30).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
        assert scaler._get_growth_tracker() == 0


def test_grad_scaler_pass_itself(device: str) -> None:
    class Optimizer(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self._step_supports_amp_scaling = True

    class TakesScaler(Optimizer):
        def step(self, closure=None, *, grad_scaler=None):
            assert isinstance(grad_scaler, torch.amp.GradScaler)
            assert not hasattr(self, "grad_scale") and not hasattr(self, "found_inf")
            return "first"

    class FindsTensors(Optimizer):
        def step(self, closure=None):
            assert isinstance(self.grad_scale, torch.Tensor) and isinstance(self.found_inf, torch.Tensor)
            return "second"

    model = nn.Linear(4, 1)
    first, second = TakesScaler(model.parameters()), FindsTensors(model.parameters())
    scaler = GradScaler(device, init_scale=2.0)
    scaler.scale(model(torch.randn(4, 4)).mean()).backward()
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        assert scaler.step(first) == "first"
    assert scaler.step(second) == "second"
    assert not hasattr(second, "grad_scale") and not hasattr(second, "found_inf")
    scaler.update()
